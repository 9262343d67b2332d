"""A profile fitted to a user's measurements: found again where it made them, refused where they make no sense."""

from __future__ import annotations

import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core.catalog import find_profile, parse_catalog
from emulator.core.cost import Chunk, FittedCost, StepShape
from emulator.core.errors import ConfigError
from emulator.core.hardware import DecodeFit, FittedProfile
from emulator.core.profile_fit import Measurement, ProfileFit, fit, parse_measurements, to_toml
from emulator.lab.catalog_files import load_catalog
from emulator.study.step_times import load_files
from tests.examples import examples

HEADER = "phase,tokens,batch,ms\n"
TERMS = st.floats(0.0, 10.0).filter(lambda value: value == 0 or value > 1e-3)


def fitted(rows: list[Measurement]) -> ProfileFit:
    return fit(rows, where="mine.csv", name="mine", model="Llama-3.1-8B", gpu="h100", tp=1)


def rows_of(profile: FittedProfile) -> list[Measurement]:
    """What a profile itself gives, as if it had been measured."""
    cost = FittedCost(profile=profile)
    prefills = [(n, batch, context) for n in (64, 512, 3000) for batch in (1, 4) for context in (0, 1000)]
    decodes = [(batch, context) for batch in (1, 16, 64) for context in (128, 4000)]
    made = []
    for tokens, batch, context in prefills:
        seconds = cost.step_s(StepShape((Chunk(tokens, context),) * batch, 0, 0))
        made.append(Measurement(0, "prefill", tokens, batch, context, seconds * 1e3))
    for batch, context in decodes:
        made.append(
            Measurement(0, "decode", 1, batch, context, cost.step_s(StepShape((), batch, batch * context)) * 1e3)
        )
    return made


@examples(40)
@given(st.lists(TERMS, min_size=6, max_size=6))
def test_a_profile_is_found_again(terms: list[float]) -> None:
    a, b, c, base, per_context, per_row = terms
    profile = FittedProfile(
        name="made",
        model="m",
        gpu="g",
        tp=1,
        prefill_base_ms=a + 0.01,
        prefill_per_token_ms=b / 100,
        prefill_per_token2_ms=c / 1e5,
        decode=DecodeFit(base_ms=base + 0.01, per_context_token_ms=per_context / 1e4, per_sequence_ms=per_row / 10),
        source="made up",
    )
    found = fitted(rows_of(profile))
    assert max(abs(row.error) for row in found.rows) < 1e-6
    again = FittedCost(profile=found.profile).step_s(StepShape((Chunk(1500, 300),), 0, 0))
    assert again == pytest.approx(FittedCost(profile=profile).step_s(StepShape((Chunk(1500, 300),), 0, 0)), rel=1e-5)


def test_a_sweep_is_met_as_well_as_by_the_published_fit() -> None:
    """Llama-3.1-8B on H100: the profile of the catalog has a mean error of 5.8 % in prefill and 2.4 % in decode."""
    sweep = [s for s in load_files().sweeps if (s.model, s.gpu, s.tp) == ("Llama-3.1-8B", "h100", 1)]
    rows = [Measurement(0, s.phase, s.tokens or 0, s.batch, 0, s.ms) for s in sweep if s.phase == "prefill"]
    rows += [Measurement(0, s.phase, 1, s.batch, s.tokens or 0, s.ms) for s in sweep if s.phase == "decode"]
    found = fitted(rows)
    assert len(found.rows) == 16 + 45
    assert found.prefill.mean < 0.06
    assert found.decode.mean < 0.025
    published = find_profile(load_catalog(), "aiconfigurator-llama-3.1-8b-h100-tp1")
    assert found.profile.prefill_per_token_ms == pytest.approx(published.prefill_per_token_ms, rel=0.1)
    assert found.profile.decode.base_ms == pytest.approx(published.decode.base_ms, rel=0.05)


def test_no_term_is_negative_where_the_measurements_would_have_it_so() -> None:
    """A prompt's time that rises ever more slowly would need a negative quadratic term."""
    prefills = [Measurement(0, "prefill", n, 1, 0, ms) for n, ms in ((100, 10.0), (1000, 80.0), (4000, 200.0))]
    decodes = [Measurement(0, "decode", 1, b, c, ms) for b, c, ms in ((1, 100, 5.0), (8, 100, 5.5), (8, 2000, 6.0))]
    profile = fitted(prefills + decodes).profile
    assert profile.prefill_per_token2_ms == 0.0
    assert profile.prefill_per_token_ms > 0


def test_relative_errors_are_what_is_small() -> None:
    """One long prefill does not drown the short ones: at 128 tokens the fit is within some per cent."""
    prefills = [(128, 10.0), (256, 16.0), (512, 28.0), (16384, 1700.0)]
    decodes = [Measurement(0, "decode", 1, b, 100 * b, 5.0 + b) for b in (1, 2, 8)]
    found = fitted([Measurement(0, "prefill", n, 1, 0, ms) for n, ms in prefills] + decodes)
    assert abs(found.rows[0].error) < 0.05


def test_the_toml_is_a_profile_of_the_catalog() -> None:
    found = fitted(rows_of(find_profile(load_catalog(), "article-70b")))
    text = to_toml(msgspec.structs.replace(found.profile, name='with "quotes" and \\'))
    assert list(tomllib.loads(text)) == ["profiles"]
    assert parse_catalog({"x": text}).profiles[0] == msgspec.structs.replace(found.profile, name='with "quotes" and \\')
    assert "mean error prefill 0.0%" in found.profile.source


# --- the file ---------------------------------------------------------------------------------------------------


def test_a_file_is_read_with_its_columns_in_any_order() -> None:
    text = (
        "ms, batch ,tokens,phase,context,gpu\n3.5,2,100,prefill,50,h100\n4,8,,decode,2000,h100\n4,8,2000,decode,,h100\n"
    )
    rows, of = parse_measurements(text, "mine.csv")
    assert rows == [
        Measurement(2, "prefill", 100, 2, 50, 3.5),
        Measurement(3, "decode", 1, 8, 2000, 4.0),
        Measurement(4, "decode", 1, 8, 2000, 4.0),
    ]
    assert of == {"gpu": "h100"}


BAD = {
    "empty": ("", "line 1: must name the columns phase, tokens, batch, ms .*got nothing"),
    "no header": ("prefill,128,1,3.5\n", "line 1: must name the columns"),
    "unknown column": ("phase,tokens,batch,ms,power\n", "line 1: .*got phase, tokens, batch, ms, power"),
    "column twice": ("phase,tokens,batch,ms,ms\n", "line 1"),
    "too few values": (HEADER + "prefill,128,1\n", "line 2: a row has 4 values"),
    "too many values": (HEADER + "prefill,128,1,3,4\n", "line 2: a row has 4 values"),
    "unknown phase": (
        HEADER + "prefill,128,1,3\nmixed,128,1,3\n",
        "line 3: phase = 'mixed': must be prefill or decode",
    ),
    "no tokens": (HEADER + "prefill,0,1,3\n", "line 2: tokens = '0'.*at least 1"),
    "half a token": (HEADER + "prefill,1.5,1,3\n", "line 2: tokens = '1.5': must be a whole number"),
    "no batch": (HEADER + "decode,128,0,3\n", "line 2: batch = '0'"),
    "no time": (HEADER + "prefill,128,1,0\n", "line 2: ms = '0': must be a number above 0"),
    "not a number": (HEADER + "prefill,128,1,nan\n", "line 2: ms = 'nan'"),
    "endless": (HEADER + "prefill,128,1,inf\n", "line 2: ms = 'inf'"),
    "two contexts": ("phase,tokens,batch,context,ms\ndecode,128,1,64,3\n", "line 2: tokens = '128' and context = '64'"),
    "two GPUs": ("phase,tokens,batch,ms,gpu\nprefill,1,1,3,h100\nprefill,1,1,3,a100\n", "line 3: gpu = 'a100'.*'h100'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_makes_no_sense_is_refused_with_its_line(case: str) -> None:
    text, message = BAD[case]
    with pytest.raises(ConfigError, match=rf"^mine\.csv: {message}"):
        parse_measurements(text, "mine.csv")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("prefill,10,1,3\nprefill,20,1,4\n", "2 prefill rows; three terms need at least 3"),
        ("prefill,10,1,3\nprefill,20,1,4\nprefill,40,1,4\n", "0 decode rows"),
        ("prefill,10,1,3\nprefill,20,1,4\nprefill,20,1,5\n", "prefill rows do not tell three terms apart"),
        (
            "prefill,10,1,3\nprefill,20,1,4\nprefill,50,1,5\ndecode,10,4,3\ndecode,20,4,4\ndecode,40,4,6\n",
            "decode rows do not tell three terms apart: measure at least 3 different contexts and batches",
        ),
    ],
)
def test_too_little_is_refused(rows: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fitted(parse_measurements(HEADER + rows, "mine.csv").rows)

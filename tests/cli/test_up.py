"""`pdemu up` and `pdemu tokenizer`: what they refuse before anything starts, and what a tokenizer folder has."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from emulator.core.vocabulary import SIZE
from emulator.lab import unprivileged
from emulator.lab.serve import targets_file
from tests.in_process import Pdemu
from tests.live.lab import SMALL


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--http", "0.0.0.0:8000"], ["--http 0.0.0.0:8000", "--api-key", "--insecure"]),
        (["--http", "8000"], ["--http 8000", "ADDRESS:PORT"]),
        (["--http", "127.0.0.1:70000"], ["--http 127.0.0.1:70000", "ADDRESS:PORT"]),
        (["--http", "example:80"], ["--http example:80", "ADDRESS:PORT"]),
        (["--api-key", ""], ["--api-key", "printable"]),
        (["--api-key", "a\nb"], ["--api-key", "printable"]),
        (["--metrics", "9100"], ["--metrics 9100", "ADDRESS:PORT"]),
        (["--metrics", "0.0.0.0:9100", "--api-key", "k"], ["--metrics 0.0.0.0:9100", "--insecure"]),
        (["--metrics", "127.0.0.1:65534"], ["--metrics 127.0.0.1:65534", "no 2 ports"]),
        (["--metrics-targets", "x.json"], ["--metrics-targets x.json", "give --metrics too"]),
        (["--metrics", "127.0.0.1:0", "--metrics-targets", "/no/x.json"], ["--metrics-targets /no/x.json", "/no"]),
        (["--deployment", "nonsense"], ["no deployment 'nonsense'", "colocated, 1P1D"]),
        (["--deployment", "1P1D", "--kv-bandwidth", "1Gbps,2Gbps"], ["one --kv-bandwidth"]),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    pdemu: Pdemu, tmp_path: Path, options: list[str], parts: list[str]
) -> None:
    out = tmp_path / "out"
    pdemu("up", SMALL, "--out", out, *options).check_refusal(parts)
    assert not out.exists()


def test_namespaces_that_nobody_could_reach_are_refused(
    pdemu: Pdemu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unprivileged, "missing_capabilities", lambda: ["CAP_NET_ADMIN"])
    pdemu("up", SMALL, "--launcher", "netns", "--out", tmp_path / "out").check_refusal(["run as root"])


def test_a_tokenizer_folder_has_its_files_and_the_models_context(pdemu: Pdemu, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    assert pdemu("tokenizer", folder, "--topology", SMALL).code == 0
    assert {path.name for path in folder.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    assert msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())["model_max_length"] == 1024
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == SIZE
    pdemu("tokenizer", folder).check_refusal(["not empty"])


def test_a_tokenizer_folder_that_cannot_be_made_is_refused(pdemu: Pdemu, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    pdemu("tokenizer", tmp_path / "file").check_refusal(["DIR", "give a folder that can"])


def test_prometheus_reads_where_metrics_are_from_a_file() -> None:
    """The form of `file_sd_configs`: a list of targets with labels."""
    found = targets_file({"router": "http://127.0.0.1:9100/metrics", "decode-0": "http://[::1]:9101/metrics"})
    assert msgspec.json.decode(found) == [
        {"targets": ["127.0.0.1:9100"], "labels": {"process": "router"}},
        {"targets": ["[::1]:9101"], "labels": {"process": "decode-0"}},
    ]

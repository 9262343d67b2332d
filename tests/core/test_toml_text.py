"""Whatever is written is read back as it was."""

from __future__ import annotations

import math
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import toml_text

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
SCALARS = TEXTS | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
INLINE = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXTS, below, max_size=3), max_leaves=8
)


@given(st.dictionaries(TEXTS, INLINE, max_size=5))
def test_every_document_is_read_back_as_it_was(data: dict[str, object]) -> None:
    assert tomllib.loads(toml_text.document(data)) == data


def test_scalars_come_first_then_tables_and_lists_of_tables() -> None:
    data = {"one": {"a": 1.0}, "name": 'a "b"', "many": [{"b": {"c": [1, 2]}}, {"b": {}}]}
    assert toml_text.document(data) == (
        'name = "a \\"b\\""\n\n[one]\na = 1.0\n\n[[many]]\nb = { c = [1, 2] }\n\n[[many]]\nb = {}\n'
    )


@pytest.mark.parametrize("value", [None, math.nan, math.inf, object()])
def test_what_toml_has_not_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"not written|has no"):
        toml_text.document({"key": value})

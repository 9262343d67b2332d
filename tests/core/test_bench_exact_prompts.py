"""Prompts of exactly so many tokens, whatever the tokenizer makes of each word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.core import vocabulary
from emulator.core.bench.exact_prompts import ExactPrompts, WordTokens
from emulator.core.bench.prompts import CALIBRATION_WORDS, POOL_WORDS, WORDS, Calibration, PromptPool

POOL = PromptPool(0)
OWN = WordTokens(tuple(vocabulary.count(f" {word}") for word in WORDS), tuple(vocabulary.count(word) for word in WORDS))
sizes = st.lists(st.integers(1, 9), min_size=len(WORDS), max_size=len(WORDS))


def test_our_own_vocabulary_has_the_tokens_of_its_words() -> None:
    text = POOL.text(3, 400)
    assert OWN.count(text) == vocabulary.count(text)


@given(
    spaced=sizes, leading=sizes, overhead=st.integers(0, 40), number=st.integers(0, 5_000), more=st.integers(0, 3_000)
)
def test_a_prompt_has_its_length_where_a_word_of_one_token_exists(
    spaced: Sequence[int], leading: Sequence[int], overhead: int, number: int, more: int
) -> None:
    words = WordTokens((1, *spaced[1:]), tuple(leading), overhead)
    tokens = overhead + max(leading) + more
    assert words.count(ExactPrompts(POOL, words).text(number, tokens)) == tokens


@given(size=st.integers(2, 9), number=st.integers(0, 5_000), tokens=st.integers(0, 500))
def test_where_no_words_have_it_the_prompt_is_the_closest_shorter_one(size: int, number: int, tokens: int) -> None:
    words = WordTokens((size,) * len(WORDS), (size,) * len(WORDS))
    text = ExactPrompts(POOL, words).text(number, tokens)
    assert words.count(text) == max(1, tokens // size) * size


@pytest.mark.parametrize("tokens", [20, 100, 1024, 8192, 3 * POOL_WORDS + 5, 5 * POOL_WORDS])
def test_our_own_vocabulary_is_met_to_the_token(tokens: int) -> None:
    prompts = ExactPrompts(POOL, OWN)
    texts = [prompts.text(number, tokens) for number in (0, 1, 77, POOL_WORDS // 2 + 3)]
    assert [vocabulary.count(text) for text in texts] == [tokens] * 4
    assert len({text[:40] for text in texts}) == 4


def test_prompts_share_no_beginning() -> None:
    prompts = ExactPrompts(POOL, OWN)
    assert len({tuple(prompts.text(n, 200).split()[:16]) for n in range(200)}) == 200


def test_what_a_server_counts_besides_its_words_is_found() -> None:
    few, many = POOL.calibration_texts()
    counted = [(text, vocabulary.count(text) + 7) for text in (few, many)]
    words = WordTokens.of(OWN.spaced, OWN.leading, counted)
    assert words is not None
    assert words.overhead == 7


def test_a_tokenizer_that_words_do_not_explain_is_not_used() -> None:
    few, many = POOL.calibration_texts()
    assert WordTokens.of(OWN.spaced, OWN.leading, [(few, 100), (many, 300)]) is None
    assert WordTokens.of((0, *OWN.spaced[1:]), OWN.leading, [(few, vocabulary.count(few))]) is None


def test_two_texts_tell_the_length_of_all_prompts_on_average() -> None:
    """Our vocabulary has 4.0 ± 1.6 tokens a word, so a text of another mix of words misleads by several percent."""
    for seed in range(8):
        pool = PromptPool(seed)
        few, many = (vocabulary.count(text) for text in pool.calibration_texts())
        calibration = Calibration.of(CALIBRATION_WORDS, (few, many))
        assert calibration is not None
        lengths = [vocabulary.count(pool.text(n, calibration.words(1024))) for n in range(300)]
        assert np.mean(lengths) == pytest.approx(1024, rel=0.01)

"""The vocabulary: what is written is read back token by token, here and by any byte-level BPE that loads its files."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from emulator.core import vocabulary
from emulator.core.chat_template import prompt_of
from emulator.core.tokenizer_files import tokenizer_files
from emulator.core.vocabulary import (
    BEGIN,
    END,
    SIZE,
    count,
    decode,
    encode,
    first_written,
    seed_of,
    written,
    written_span,
    written_text,
)

FILES = tokenizer_files(4_096)
TOKENIZER: dict[str, Any] = msgspec.json.decode(FILES["tokenizer.json"])
NEAR_WORDS = st.text(st.sampled_from("bdaeioz <|>begin\n é☃A9.'"), max_size=60)
TEXTS = st.one_of(st.text(max_size=60), NEAR_WORDS)


def bpe(text: str) -> list[int]:
    """Byte-level BPE by the book, from the files alone: special tokens, split, then the best merge again and again."""
    model = TOKENIZER["model"]
    vocab: dict[str, int] = model["vocab"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(model["merges"])}
    special = {token["content"]: token["id"] for token in TOKENIZER["added_tokens"]}
    pattern = re.compile(TOKENIZER["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"])
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, special))})", text):
        if part in special:
            ids.append(special[part])
            continue
        for piece in pattern.findall(part):
            symbols = [gpt2_symbol(value) for value in piece.encode("utf-8", errors="replace")]
            while True:
                pairs = [(ranks[pair], n) for n, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
                if not pairs:
                    break
                _, n = min(pairs)
                symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]
            ids += [vocab[symbol] for symbol in symbols]
    return ids


def gpt2_symbol(value: int) -> str:
    """As GPT-2's `bytes_to_unicode` has it: printable bytes are themselves, the n-th other one is U+0100 + n."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return chr(value) if value in printable else chr(256 + [b for b in range(256) if b not in printable].index(value))


@given(TEXTS)
def test_text_is_read_as_a_byte_level_bpe_with_these_files_reads_it(text: str) -> None:
    assert encode(text) == bpe(text)
    assert count(text) == len(bpe(text))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As clients load it."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(FILES["tokenizer.json"])
    return Tokenizer.from_file(str(path))


@given(text=TEXTS)
def test_hugging_faces_library_reads_and_writes_as_this_does(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text).ids == encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(TEXTS, st.integers(1, 44))
def test_a_long_text_is_read_as_a_short_one_is(text: str, before: int) -> None:
    """Long ones are read in blocks; a token may lie on both sides of a boundary."""
    long = "ba baba" * 9_356 + "x" * before
    assert 65_536 - 44 < len(long) <= 65_536
    assert encode(long + text) == encode(long) + encode("x" + text)[1:]
    assert count(long + text) == count(long) + count("x" + text) - 1


def test_a_text_that_is_too_long_is_not_read_to_its_end() -> None:
    text = "x" * 200_000
    for tokens in (count(text, 70_000), len(encode(text, 70_000))):
        assert 70_000 < tokens < 200_000
    for tokens in (count(text, 200_000), len(encode(text, 200_000))):
        assert tokens == 200_000


@given(TEXTS)
def test_tokens_give_the_text_back(text: str) -> None:
    assert decode(encode(text)) == text


@given(st.integers(min_value=0, max_value=2**32 - 1), st.integers(min_value=1, max_value=300))
def test_each_written_token_is_exactly_one_when_its_text_is_read(seed: int, n: int) -> None:
    tokens = [written(seed, index) for index in range(n)]
    text = "".join(written_text(seed, index) for index in range(n))
    assert encode(text) == encode(text.strip()) == tokens
    assert decode(tokens) == text


@given(seed=st.integers(min_value=0, max_value=2**32 - 1), n=st.integers(min_value=1, max_value=300))
def test_a_client_counts_what_was_written_as_it_was_counted(tokenizer: Tokenizer, seed: int, n: int) -> None:
    text = "".join(written_text(seed, index) for index in range(n))
    assert len(tokenizer.encode(text).ids) == n


def test_a_written_text_goes_through_all_words_before_it_repeats() -> None:
    words = [written(7, index) for index in range(1, 6401)]
    assert len(set(words)) == 6400
    assert written(7, 6401) == words[0]


SEEDS = st.integers(min_value=0, max_value=2**32 - 1)


@given(SEEDS, st.integers(0, 70_000), st.integers(0, 70_000))
def test_a_part_of_a_written_text_is_as_it_is_in_the_whole(seed: int, start: int, length: int) -> None:
    whole = "".join(written_text(seed, index) for index in range(28_001))
    assert written_span(seed, start, start + length) == whole[start : start + length]


@given(SEEDS, st.integers(0, SIZE), st.integers(0, 13_000))
def test_the_first_place_of_a_token_is_where_it_is_first_written(seed: int, token: int, least: int) -> None:
    found = first_written(seed, token, least)
    places = (index for index in range(least, least + 6_401) if written(seed, index) == token)
    assert found == next(places, None)


def test_the_end_is_never_written() -> None:
    assert {written(seed, index) for seed in range(50) for index in range(50)}.isdisjoint({0, 1})


def test_the_same_prompt_has_the_same_seed_and_another_has_another() -> None:
    assert seed_of("a") == seed_of("a") != seed_of("b")
    assert seed_of([1, 2]) == seed_of([1, 2]) != seed_of([12])


def test_special_tokens_are_one_token_each() -> None:
    assert encode(f"{BEGIN}a{END}") == [0, vocabulary.FIRST_BYTE + ord("a"), 1]


def test_the_files_hold_every_token_once_and_say_how_long_a_context_is() -> None:
    vocab = TOKENIZER["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(SIZE))
    assert TOKENIZER["post_processor"] is None
    config = msgspec.json.decode(FILES["tokenizer_config.json"])
    assert config["model_max_length"] == 4_096
    assert config["eos_token"] == END


def test_every_merge_is_of_tokens_and_makes_one() -> None:
    vocab = TOKENIZER["model"]["vocab"]
    for merge in TOKENIZER["model"]["merges"]:
        one, two = merge.split(" ")
        assert {one, two, one + two} <= vocab.keys()


def test_the_chat_template_is_role_and_content_a_line_then_the_assistants_turn() -> None:
    assert prompt_of([("system", "be brief"), ("user", "hi")]) == "system: be brief\nuser: hi\nassistant:"

"""The vocabulary as a tokenizer in Hugging Face's form, so that clients count as the endpoint does.

A byte-level BPE without normalizer and post-processor: text is split before each run of small letters, taking one space
along, and nothing is added at its ends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from emulator.core.chat_template import JINJA
from emulator.core.vocabulary import BEGIN, END, SPECIALS, SYLLABLES, TOKENS


def tokenizer_files(context_tokens: int) -> dict[str, bytes]:
    """Every file of the directory, by name; `context_tokens` is the most that a request may have."""
    return {
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_config(context_tokens)),
        "special_tokens_map.json": _json({"bos_token": BEGIN, "eos_token": END, "pad_token": END}),
    }


def _tokenizer() -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": " ?[a-z]+|[^a-z]"}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": text} | _AS_IT_IS for n, text in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {symbols(token): token_id for token_id, token in enumerate(TOKENS)},
            "merges": merges(),
        },
    }


_AS_IT_IS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def _config(context_tokens: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": JINJA,
    }


def merges() -> list[str]:
    """Pairs in the order in which BPE joins them: a syllable, a space and a syllable, that and one more."""
    space = symbols(b" ")
    pairs = [f"{syllable[0]} {syllable[1]}" for syllable in SYLLABLES]
    pairs += [f"{space} {syllable}" for syllable in SYLLABLES]
    pairs += [f"{space}{one} {two}" for one in SYLLABLES for two in SYLLABLES]
    return pairs


def symbols(token: bytes) -> str:
    """A token as byte-level BPE writes it: one printable character a byte."""
    if token in (special.encode() for special in SPECIALS):
        return token.decode()
    return "".join(_SYMBOLS[value] for value in token)


def _byte_symbols() -> list[str]:
    """Printable bytes stand for themselves, the others for characters from U+0100 on (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


_SYMBOLS = _byte_symbols()


def _json(value: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"

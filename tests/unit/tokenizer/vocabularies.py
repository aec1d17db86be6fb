"""Small vocabularies, built in memory: a byte-level one and a sentencepiece one, with the real rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.tokenizer.tokenizer import BYTE_OF_CHAR, Tokenizer

DATA = Path(__file__).parents[2] / "data"

_MERGES = [
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "Ġ Ġ",
    "e r",
    "Ġ a",
    "o n",
    "ï ¸",
    "ð Ł",
    "ðŁ ĺ",
    "Ċ Ċ",
    "< |",
    "| >",
    "ã ģ",
]
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def gpt2_metadata(
    specials: Sequence[str] = CHATML, user_defined: Sequence[str] = (), **keys: Any
) -> dict[str, Any]:
    """The GGUF header of a byte-level vocabulary: specials first, then bytes, then merged tokens."""
    merged = [merge.replace(" ", "") for merge in _MERGES]
    tokens = [*specials, *sorted(BYTE_OF_CHAR), *merged, *user_defined]
    types = [3] * len(specials) + [1] * (256 + len(merged)) + [4] * len(user_defined)
    header = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": types,
        "merges": _MERGES,
        "eos_token_id": len(specials) - 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (header | keys).items() if value is not None}


def spm_metadata(**keys: Any) -> dict[str, Any]:
    """The GGUF header of a sentencepiece vocabulary with byte fallback."""
    words = ["▁", "▁t", "he", "▁the", "in", "▁a", "er", "▁▁", "▁in", "ab", "abc"]
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + list("äöü한글가나日本語")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(letters))
    header = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(letters))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (header | keys).items() if value is not None}


def gpt2_tokenizer(specials: Sequence[str] = CHATML, **keys: Any) -> Tokenizer:
    return Tokenizer.from_gguf(gpt2_metadata(specials, **keys))


def spm_tokenizer(**keys: Any) -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata(**keys))


def id_of(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_id(text)
    assert token_id is not None, text
    return token_id

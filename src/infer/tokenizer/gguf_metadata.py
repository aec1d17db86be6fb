"""Write a vocabulary as the `tokenizer.*` keys of a GGUF file: the inverse of gguf_vocab.py.

    byte-level BPE       ──►   tokens, merges, and the name of the split rule
    sentencepiece BPE    ──►   tokens and scores: minus the rank of the first merge that makes a token

Readers of the file know split rules by name only, so a rule without a name is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infer.errors import ConfigError
from infer.tokenizer.vocabulary import SPLIT_RULES, Vocabulary

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_metadata(vocabulary: Vocabulary, eos_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return the `tokenizer.*` keys of a vocabulary: byte-level, or sentencepiece BPE with byte tokens."""
    core = vocabulary.core
    state = json.loads(core.to_str())
    if state["model"].get("type") != "BPE":
        raise ConfigError(
            f"a tokenizer of type {state['model'].get('type')} cannot be written as GGUF, only BPE"
        )
    names, added = core.get_vocab(with_added_tokens=True), core.get_added_tokens_decoder()
    tokens = [f"[PAD{number}]" for number in range(max(vocab_size, 1 + max(names.values())))]
    types = [_UNUSED] * len(tokens)
    unknown = names.get(state["model"].get("unk_token"))
    for token, number in names.items():
        mark = added.get(number)
        plain = _BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else _NORMAL
        tokens[number] = token
        types[number] = plain if mark is None else _CONTROL if mark.special else _USER_DEFINED
    merges = [
        tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair)
        for pair in state["model"]["merges"]
    ]
    is_sentencepiece = bool(state["model"].get("byte_fallback"))
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if is_sentencepiece else "gpt2",
        "tokenizer.ggml.tokens": tokens,
    }
    if is_sentencepiece:
        if unknown is not None:
            types[unknown] = _UNKNOWN
            found["tokenizer.ggml.unknown_token_id"] = unknown
        ranks = {"".join(pair): rank for rank, pair in reversed(list(enumerate(merges)))}
        found["tokenizer.ggml.scores"] = [-float(ranks.get(token, len(merges))) for token in tokens]
        spaced = json.dumps([state["normalizer"], state["pre_tokenizer"]])
        found["tokenizer.ggml.add_space_prefix"] = (
            '"Prepend"' in spaced or '"prepend_scheme": "first"' in spaced
        )
    else:
        found["tokenizer.ggml.pre"] = _cut_of(state)
        found["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    found["tokenizer.ggml.token_type"] = types
    bos, begun = vocabulary.bos_id, core.encode("a").ids[:1]
    found["tokenizer.ggml.add_bos_token"] = (
        begun == [bos] if vocabulary.add_bos is None else vocabulary.add_bos
    )
    found["tokenizer.ggml.add_eos_token"] = bool(vocabulary.add_eos)
    ends = dict.fromkeys((*vocabulary.eos_ids, *eos_ids))
    names_of_ids = zip(("bos", "eos", "eot", "eom"), (bos, *ends), strict=False)
    found |= {
        f"tokenizer.ggml.{name}_token_id": number for name, number in names_of_ids if number is not None
    }
    if vocabulary.chat_template is not None:
        found["tokenizer.chat_template"] = vocabulary.chat_template
    return found


def _cut_of(state: dict[str, Any]) -> str:
    """Return GGUF's name for the split rule of a byte-level tokenizer."""
    whole = state["pre_tokenizer"] or {}
    patterns: list[str] = []
    for part in whole.get("pretokenizers", [whole]):
        kind = part.get("type")
        if kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            patterns.append(part["pattern"].get("Regex") or re.escape(part["pattern"]["String"]))
        elif kind == "Digits" and part["individual_digits"]:
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            patterns += SPLIT_RULES["gpt-2"].patterns if part.get("use_regex", True) else ()
        else:
            patterns.append(f"{kind}: {part}")
    takes_words = bool(state["model"].get("ignore_merges"))
    named = [name for name, rule in SPLIT_RULES.items() if rule.patterns == tuple(patterns)]
    if not named:
        raise ConfigError(
            f"the tokenizer cuts text by {patterns}, which has no name in GGUF that is known here; known: "
            f"{', '.join(SPLIT_RULES)}"
        )
    is_nfc = (state["normalizer"] or {}).get("type") == "NFC"
    return min(  # the first of the closest ones
        named,
        key=lambda name: (SPLIT_RULES[name].whole_words != takes_words, SPLIT_RULES[name].nfc != is_nfc),
    )

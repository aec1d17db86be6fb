"""A tokenizer from the header of a GGUF file.

GGUF stores the vocabulary as parallel lists, and the merges in one of these ways:

    tokenizer.ggml.model = "gpt2"    byte-level BPE: `merges` in order of rank, `pre` names the split rule
    tokenizer.ggml.model = "llama"   sentencepiece BPE: `scores`, one per token, and no list of merges
    tokenizer.ggml.model = "gemma4"  the same with a list of merges

Sentencepiece merges the adjacent pair whose union has the best score. The `tokenizers` library expects a
ranked list of pairs instead, so each token is split in two wherever both halves are tokens:

    "▁the" (score -12)   ──►   ("▁", "the"), ("▁t", "he"), ("▁th", "e")     all with rank of -12

Characters without a token are spelled in bytes: "<0xE2>" "<0x82>" "<0xAC>" is "€".

`token_type` is the kind of each token: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
Control tokens take no part in merging, so that text never becomes one by accident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers

from infer.errors import CheckpointError
from infer.tokenizer.vocabulary import (
    SPLIT_RULES,
    SplitRule,
    Vocabulary,
    add_tokens,
    build_bpe,
    byte_level_core,
    joined_template,
)

MAX_TOKEN_CHARS = 1024  # longer than any real token; the time to find a token's merges is quadratic
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

# GGUF has a single end-of-sequence id; chat models also end a turn with one of these
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>")


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Build the tokenizer's parts from the `tokenizer.*` keys of a GGUF header."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(
            f"tokenizer.ggml.model is {kind!r}, this engine reads 'gpt2' (byte-level BPE), 'llama' and "
            "'gemma4' (sentencepiece BPE); give a directory with a tokenizer.json through --tokenizer"
        )
    tokens = _read_list(metadata, "tokens", str)
    types = _read_list(metadata, "token_type", int, like=tokens, default=1)
    if kind == "gpt2":
        rule = _find_split_rule(metadata)
        core = byte_level_core(_index(tokens), _read_merges(metadata), rule)
        adds_bos = rule.adds_bos
    else:
        # Gemma's converter writes runs of ▁ as spaces; the merges below must see them as ▁
        tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
        core = _sentencepiece_core(tokens, types, metadata)
        adds_bos = True
    matched_whole = {
        i: AddedToken(token, special=types[i] != _USER_DEFINED, normalized=False)
        for i, token in enumerate(tokens)
        if types[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    add_tokens(core, matched_whole)
    return Vocabulary(
        core=core,
        bos_id=_read_id(metadata, "bos_token_id", len(tokens)),
        eos_ids=_read_eos_ids(metadata, tokens, types),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=joined_template(
            metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_template.tool_use")
        ),
    )


def _find_split_rule(metadata: Mapping[str, Any]) -> SplitRule:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in SPLIT_RULES:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {pre!r}, this engine knows {', '.join(SPLIT_RULES)}; "
            "give a directory with a tokenizer.json through --tokenizer"
        )
    return SPLIT_RULES[pre]


def _sentencepiece_core(
    tokens: list[str], types: list[int], metadata: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    scores = _read_list(metadata, "scores", float, like=tokens, default=0.0)
    if (longest := max(map(len, tokens))) > MAX_TOKEN_CHARS:
        raise CheckpointError(
            f"tokenizer.ggml.tokens holds a token of {longest} characters, at most {MAX_TOKEN_CHARS} are "
            "read; the GGUF file is damaged"
        )
    unknown = _read_id(metadata, "unknown_token_id", len(tokens))
    has_merges = metadata.get("tokenizer.ggml.model") == "gemma4"
    core = tokenizers.Tokenizer(
        build_bpe(
            vocab=_index(tokens),
            merges=_read_merges(metadata) if has_merges else _merges_from_scores(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_marks = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", not has_merges):
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_marks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        core.normalizer = to_marks
    core.decoder = decoders.Sequence(steps)
    return core


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Rank every pair of tokens that makes a token: user-defined ones first, longest first, then by score."""
    mergeable = {
        token: index
        for index, token in enumerate(tokens)
        if types[index] not in (_UNKNOWN, _CONTROL, _UNUSED)
    }
    order = sorted(
        (index for index in mergeable.values() if len(tokens[index]) > 1),
        key=lambda i: (0, -len(tokens[i])) if types[i] == _USER_DEFINED else (1, -scores[i]),
    )
    merges: list[tuple[str, str]] = []
    for index in order:
        token = tokens[index]
        pairs = [
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in mergeable and token[cut:] in mergeable
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (mergeable[pair[0]], mergeable[pair[1]]))
        merges.extend(pairs)
    return merges


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for line in _read_list(metadata, "merges", str):
        left, gap, right = line.partition(" ")
        if not gap or not left or not right or " " in right:
            raise CheckpointError(f"tokenizer.ggml.merges holds {line!r}, expected two tokens and one space")
        merges.append((left, right))
    return merges


def _index(tokens: list[str]) -> dict[str, int]:
    index = {token: i for i, token in enumerate(tokens)}
    if len(index) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if index[token] != i)
        raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} twice; the file is damaged")
    return index


def _read_list(
    metadata: Mapping[str, Any], name: str, kind: type, *, like: list[str] | None = None, default: Any = None
) -> list[Any]:
    """Read one of the parallel lists, which must be as long as `like`; if absent, it is all `default`."""
    key = f"tokenizer.ggml.{name}"
    raw = metadata.get(key)
    if raw is None and like is not None:
        return [default] * len(like)
    if raw is None or isinstance(raw, str | bytes) or not hasattr(raw, "__len__"):
        raise CheckpointError(f"{key} is missing or not a list; the GGUF file is damaged")
    if like is not None and len(raw) != len(like):
        raise CheckpointError(
            f"{key} has {len(raw)} entries for {len(like)} tokens; the GGUF file is damaged"
        )
    values: Sequence[Any] = raw.tolist() if hasattr(raw, "tolist") else list(raw)
    if not values and name == "tokens":
        raise CheckpointError(f"{key} is empty; the GGUF file is damaged")
    if any(not isinstance(value, kind) for value in values):
        raise CheckpointError(f"{key} must hold {kind.__name__} values; the GGUF file is damaged")
    return list(values)


def _read_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(f"tokenizer.ggml.{name} is {value!r}, the vocabulary has {vocab_size} tokens")
    return int(value)


def _read_eos_ids(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    names: tuple[str, ...] = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends: tuple[str, ...] = TURN_ENDS
    if metadata.get("general.architecture") == "gpt-oss":  # its eot ends a message, not the answer
        names, ends = names[:1], ("<|return|>", "<|call|>")
    named = (_read_id(metadata, name, len(tokens)) for name in names)
    turn_ends = (i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in ends)
    return tuple(dict.fromkeys([i for i in named if i is not None] + list(turn_ends)))

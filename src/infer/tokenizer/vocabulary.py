"""The parts of a tokenizer, independent of the file format.

A `Vocabulary` is the `tokenizers` library's object (how text is split and merged) plus the few facts
the library does not keep: the token that begins a prompt, the ones that end an answer, and the chat template
that was shipped. `directory_vocab.py` and `gguf_vocab.py` each build one.

A byte-level vocabulary splits text into words before it merges anything, and merges never cross a split:

    "It's 1984"  ──►  It | 's | Ġ | 1 | 9 | 8 | 4        (SmolLM2: each digit alone)

The split rule is part of the model: with a wrong one ids are still valid, but not the ones the model
was trained on. `SPLIT_RULES` has the rules by their names in GGUF files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC

from infer.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The parts of a `Tokenizer`."""

    core: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None  # None: as the library's post-processor does
    add_eos: bool | None = None
    chat_template: str | None = None


def joined_template(template: object, with_tools: object) -> str | None:
    """Return one Jinja source for a model that was shipped with a chat template of its own for tools.

    Jinja drops a line break at the end of a template. The + signs keep all others next to the added tags.
    """
    if not isinstance(template, str):
        return None
    if not isinstance(with_tools, str):
        return template
    parts = with_tools.removesuffix("\n"), template.removesuffix("\n")
    return "{{% if tools +%}}{}{{%+ else +%}}{}{{%+ endif %}}".format(*parts)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # each digit alone
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The way a byte-level family splits text: patterns, each applied to the pieces of the previous one."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # True: a word in the vocabulary becomes one token without merges
    nfc: bool = False  # True: text is normalized to NFC first
    adds_bos: bool = False  # default if the file does not set it


SPLIT_RULES: dict[str, SplitRule] = {
    "gpt-2": SplitRule((_GPT2,)),
    "smollm": SplitRule((r"\p{N}", _GPT2)),
    "llama-bpe": SplitRule((_LLAMA3,), whole_words=True, adds_bos=True),
    "qwen2": SplitRule((_QWEN2,), nfc=True),
    "qwen35": SplitRule((_QWEN35,), nfc=True),
    "tekken": SplitRule((_TEKKEN,), whole_words=True, adds_bos=True),
    "default": SplitRule(_UNNAMED),
}
SPLIT_RULES |= {
    **dict.fromkeys(("llama3", "llama-v3"), SPLIT_RULES["llama-bpe"]),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), SplitRule((_LLAMA3,))),  # Phi-4, SmolLM3
    **dict.fromkeys(("refact", "starcoder"), SPLIT_RULES["smollm"]),  # Granite 3
    "command-r": replace(SPLIT_RULES["smollm"], nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), SPLIT_RULES["qwen2"]),
    "exaone4": SPLIT_RULES["gpt-2"],
    "gpt-4o": SplitRule((_O200K,)),  # Phi-4-mini, gpt-oss
}


def byte_level_core(
    vocab: dict[str, int], merges: list[tuple[str, str]], rule: SplitRule
) -> tokenizers.Tokenizer:
    """Build a byte-level BPE; special and user-defined tokens are added by the caller."""
    core = tokenizers.Tokenizer(build_bpe(vocab=vocab, merges=merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        core.normalizer = NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    return core


def build_bpe(**parts: Any) -> models.BPE:
    """Build the library's BPE; raises an error if the vocabulary and its merges do not fit together."""
    try:
        return models.BPE(**parts)
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise CheckpointError(f"the tokenizer's vocabulary and merges do not fit together: {error}") from None


def add_tokens(core: tokenizers.Tokenizer, added: dict[int, AddedToken]) -> None:
    """Add tokens that are matched before text is split; each must get its id in the checkpoint."""
    core.add_tokens([added[token_id] for token_id in sorted(added)])
    for token_id, token in added.items():
        if core.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"added token {token.content!r} should have id {token_id} but the vocabulary gives it "
                f"{core.token_to_id(token.content)}; the tokenizer files disagree with each other"
            )

"""Fill in the middle: models that were trained to write the text between two other texts.

Their vocabulary has special tokens that mark the parts; the model writes the middle after the last of them.

    <|fim_prefix|> text before <|fim_suffix|> text after <|fim_middle|>       prefix first (most models)
    [SUFFIX] text after [PREFIX] text before                                  suffix first (Codestral)

A vocabulary may have these tokens although its model never learned them, because a family shares a
vocabulary; nothing in a checkpoint shows the difference.
"""

from __future__ import annotations

from typing import NamedTuple

from infer.tokenizer.tokenizer import Tokenizer


class GapMarks(NamedTuple):
    """The ids of the tokens that mark the parts of a text with a gap."""

    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first, and nothing follows the prefix

    def join(self, before: list[int], behind: list[int]) -> list[int]:
        """Return the ids of a text with a gap, up to the point where the model continues."""
        if self.middle is None:
            return [self.suffix, *behind, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *behind, self.middle]


SPELLINGS: tuple[tuple[str, str, str | None], ...] = (  # prefix, suffix, middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


def find_gap_marks(tokenizer: Tokenizer) -> GapMarks | None:
    """Return the marks in a vocabulary; None: it has none."""
    for spellings in SPELLINGS:
        prefix, suffix, middle = (None if text is None else tokenizer.token_id(text) for text in spellings)
        if prefix is not None and suffix is not None and (middle is not None or spellings[2] is None):
            return GapMarks(prefix, suffix, middle)
    return None

"""The knobs of speculative decoding: what proposes drafts, how many, and from which files.

    --speculative-decoding                       on, with the method that the other knobs imply
    --speculative-method ngram | suffix          text that repeats itself, or recent answers
    --draft-model DIR                            a small model with the same vocabulary
    --speculative-config '{"method": ...}'       vLLM's JSON for the same

Whatever is chosen, the text stays what it would have been; docs/features/speculative-decoding.md says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from infer.config.knobs import check_choice, check_positive, knob
from infer.errors import ConfigError

MAX_DRAFTS: Final = 16  # drafts of one sequence in a step; tables with a window have room for them
WINDOW_TOKENS: Final = 128  # of a step that verifies drafts: more than pays anywhere
LOOKUPS: Final = ("ngram", "suffix")  # methods that look drafts up in texts
DRAFTED: Final = ("draft_model", "eagle3")  # methods that compute them, from files of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What proposes tokens that a step then judges together."""

    speculative_decoding: bool = knob(
        False,
        "let cheap guesses of the next tokens be judged by one step; the text stays the same; default: off, "
        "unless a method or a draft model is named",
    )
    speculative_method: str = knob(
        "auto",
        "what guesses: ngram: the text of the request itself; suffix: that and recent answers; draft_model: "
        "a small model; eagle3: a head trained for the model; auto: draft_model or eagle3 where draft_model "
        "names one, else ngram",
        choices=("auto", *LOOKUPS, *DRAFTED),
    )
    num_speculative_tokens: int | None = knob(
        None,
        f"tokens guessed for one sequence in a step, at most ({MAX_DRAFTS} or fewer); default: 8 looked up, "
        "5 computed",
        aliases=("spec_length", "speculative_num_draft_tokens"),
    )
    draft_model: str | None = knob(
        None,
        "directory, GGUF file or hub id of a small model with the same vocabulary, or of an EAGLE-3 head",
        aliases=("speculative_model", "model_draft", "speculative_draft_model_path"),
    )
    adaptive_speculation: bool = knob(
        True,
        "choose in each step how many guesses are worth their time, none included; off: always as many as "
        "num_speculative_tokens",
    )
    synthetic_acceptance: float | None = knob(
        None,
        "for benchmarks alone: keep each guess with this probability, whatever the model says; the text is "
        "wrong then",
    )

    def __post_init__(self) -> None:
        check_choice(self, "speculative_method")
        check_positive(self, "num_speculative_tokens")
        count, share = self.num_speculative_tokens, self.synthetic_acceptance
        if count is not None and count > MAX_DRAFTS:
            raise ConfigError(f"num_speculative_tokens must be at most {MAX_DRAFTS}, got {count}")
        if share is not None and not 0 <= share <= 1:
            raise ConfigError(f"synthetic_acceptance must be from 0 to 1, got {share!r}")
        if self.speculative_method in DRAFTED and self.draft_model is None:
            raise ConfigError(
                f"speculative_method={self.speculative_method} needs the files of what drafts; name them "
                "with draft_model"
            )
        if self.speculative_method in LOOKUPS and self.draft_model is not None:
            raise ConfigError(
                f"speculative_method={self.speculative_method} looks drafts up and needs no draft_model; "
                "leave one of the two out"
            )

    @property
    def is_on(self) -> bool:
        """Whether sequences get drafts."""
        return (
            self.speculative_decoding
            or self.speculative_method != "auto"
            or self.draft_model is not None
            or self.num_speculative_tokens is not None
        )

    @property
    def max_drafts(self) -> int:
        """The most drafts of one sequence in a step."""
        if not self.is_on:
            return 0
        return self.num_speculative_tokens or (8 if self.draft_model is None else 5)

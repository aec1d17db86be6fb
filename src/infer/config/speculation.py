"""The knobs of speculative decoding: the method that proposes drafts, their number, and its files.

    --speculative-decoding                       on, with the method that the other knobs imply
    --speculative-method ngram | suffix          text that repeats itself, or recent answers
    --draft-model DIR                            a small model with the same vocabulary, or an EAGLE-3 head
    --speculative-method tree --draft-model DIR  several drafts of that model for each position
    --speculative-config '{"method": ...}'       vLLM's JSON for the same

A knob of a single method (prompt_lookup_max, prompt_lookup_min, suffix_max_answers) selects that method. A
knob that changes how drafts are verified, not what makes them (adaptive_speculation, synthetic_acceptance),
is refused if nothing else turns speculative decoding on.

No method changes the text; docs/features/speculative-decoding.md says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from infer.config.knobs import check_knobs, knob, knob_rows, parse_knob
from infer.config.speculative_json import METHODS, read_speculative_config
from infer.errors import ConfigError

MAX_DRAFTS: Final = 16  # drafts of one sequence in a step; tables with a window have room for them
WINDOW_TOKENS: Final = 128  # tokens of a step that verifies drafts; more never pay
LOOKUPS: Final = ("ngram", "suffix")  # methods that look drafts up in texts
DRAFTED: Final = ("draft_model", "eagle3", "tree")  # methods that compute drafts, from files of their own
ASKS_FOR: Final = {"prompt_lookup_max": "ngram", "prompt_lookup_min": "ngram", "suffix_max_answers": "suffix"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """The proposer of drafts, which a step then verifies together."""

    speculative_decoding: bool | None = knob(
        None,
        "draft the next tokens cheaply and verify the drafts in one step; the text stays the same; default: "
        "off, unless a method, a setting of a method, a number of drafts or a draft model is given",
    )
    speculative_method: str = knob(
        "auto",
        "source of drafts: ngram: the request's own text; suffix: that text and recent answers; draft_model: "
        "a small model; eagle3: a head trained for the model; tree: a small model, with several drafts for "
        "each position; auto: by the files of draft_model, else suffix if suffix_max_answers is given, else "
        "ngram",
        choices=("auto", *LOOKUPS, *DRAFTED),
        same_as=METHODS,
        aliases=("speculative_algorithm",),
        takes_code=True,
    )
    num_speculative_tokens: int | None = knob(
        None,
        f"most drafts of a sequence in a step, up to {MAX_DRAFTS}; 0: none, whatever else is set; default: 8 "
        "if looked up or in a tree, 5 if computed one after the other",
        least=0,
        most=MAX_DRAFTS,
        aliases=("spec_length", "draft_max", "draft", "draft_n", "speculative_num_steps"),
    )
    draft_model: str | None = knob(
        None,
        "small model with the same vocabulary (directory, GGUF file or hub id), or EAGLE-3 head (directory "
        "or hub id)",
        aliases=("speculative_model", "model_draft", "speculative_draft_model_path"),
    )
    prompt_lookup_max: int = knob(
        16,
        "for ngram: most tokens at the end of a text that are looked up earlier in it",
        aliases=("ngram_prompt_lookup_max", "speculative_ngram_max_match_window_size"),
    )
    prompt_lookup_min: int = knob(
        2,
        "for ngram: fewest matching tokens after which drafts are made",
        aliases=("ngram_prompt_lookup_min", "speculative_ngram_min_match_window_size"),
    )
    suffix_max_answers: int = knob(
        4096,
        "for suffix: number of recent answers that drafts come from; 0: only the request's own text",
        least=0,
        aliases=("suffix_decoding_max_cached_requests",),
    )
    adaptive_speculation: bool = knob(
        True,
        "choose in each step how many drafts are worth their time, possibly none; off: always as many as "
        "num_speculative_tokens",
    )
    synthetic_acceptance: float | None = knob(
        None,
        "only for benchmarks: accept each draft with this probability, whatever the model says; the text is "
        "wrong then",
        least=0,
        most=1,
    )
    speculative_config: str | None = knob(
        None,
        "the same knobs as one JSON object with vLLM's names, such as "
        '{"method": "ngram", "num_speculative_tokens": 5}',
        is_json=True,
    )

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            self._take_json(self.speculative_config)
        check_knobs(self)
        if self.num_speculative_tokens == 0:
            object.__setattr__(self, "speculative_decoding", False)

    def is_given(self, name: str) -> bool:
        """True if a knob has another value than its default."""
        rows = knob_rows("speculation", SpeculationConfig)
        return any(row.name == name and row.default != getattr(self, name) for row in rows)

    @property
    def methods_asked(self) -> list[str]:
        """The methods whose own knobs are given."""
        return [method for name, method in ASKS_FOR.items() if self.is_given(name)]

    def _take_json(self, text: str) -> None:
        """Set the knobs that vLLM's JSON stands for; even without a method it turns speculation on."""
        rows = {row.name: row for row in knob_rows("speculation", SpeculationConfig)}
        for name, value in read_speculative_config(text).items():
            asked, given = parse_knob(rows[name], value), getattr(self, name)
            if given not in (rows[name].default, asked):
                raise ConfigError(
                    f"speculative_config asks for {name}={asked!r}, and {name} is {given!r}; "
                    "leave one of the two out"
                )
            object.__setattr__(self, name, asked)
        object.__setattr__(self, "speculative_config", None)
        if self.speculative_decoding is None:
            object.__setattr__(self, "speculative_decoding", True)

    @property
    def is_on(self) -> bool:
        """True if sequences get drafts."""
        if self.speculative_decoding is not None:
            return self.speculative_decoding
        named = self.speculative_method != "auto" or self.draft_model is not None or bool(self.methods_asked)
        return named or self.num_speculative_tokens is not None

    @property
    def method(self) -> str:
        """The method that proposes drafts, if any; only loading a `draft_model` shows if it is a head."""
        if self.speculative_method != "auto":
            return self.speculative_method
        if self.draft_model is not None:
            return "draft_model"
        return next(iter(self.methods_asked), "ngram")

    @property
    def max_drafts(self) -> int:
        """The most drafts of one sequence in a step."""
        if not self.is_on:
            return 0
        is_line = self.draft_model is not None and self.method != "tree"
        return self.num_speculative_tokens or (5 if is_line else 8)

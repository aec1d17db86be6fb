"""Sampling parameters: how the next token of one request is chosen from a model's logits.

The order is fixed and documented in docs/features/sampling.md:

    logit_bias -> bans (min_tokens) -> mask (structured, allowed_token_ids, bad_words)
               -> repetition, presence, frequency penalty -> temperature -> top_k -> top_p -> min_p -> draw

Each filter sees the distribution the previous one left, renormalised. `temperature=0` and `top_k=1`
skip everything after the penalties and take the largest logit.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from infer.config.defaults import MAX_SEQUENCES
from infer.config.speculation import MAX_DRAFTS
from infer.constraints.description import Reasoning, Structured
from infer.errors import RequestError, closest

T = TypeVar("T")

MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BANNED_IDS = 1024  # ids of one banned word
MAX_INT = 2**63 - 1  # largest value of any parameter; fits a tensor and every wire format
MAX_SEED = MAX_INT
MAX_LOGPROBS = 20
NO_TOKEN = -1  # id of a row without a finite logit; in no vocabulary, so using it by mistake fails loudly


class _CheckedNames(type):
    """The metaclass of a class whose constructor refuses unknown names like wrong values."""

    def __call__(cls: type[T], *unnamed: object, **given: object) -> T:
        if unnamed:
            raise RequestError(
                f"parameters are given by name, such as {cls.__name__}(temperature=0.5), "
                f"got {_shown(unnamed[0])} without a name"
            )
        known = vars(cls)["__dataclass_fields__"]
        for name in given:
            if name not in known:
                hint = closest(name, known, listed="allowed")
                raise RequestError(f"unknown sampling parameter {name!r}{hint}", param=name)
        made: T = type.__call__(cls, **given)
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """The signature of the constructor, for editors and `help`."""
        sign = inspect.signature(vars(cls)["__init__"])
        return sign.replace(parameters=list(sign.parameters.values())[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(metaclass=_CheckedNames):
    """The sampling parameters of one request; checked on construction, then never changed."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 (or -1): off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: derived from the engine's seed and the request's number
    max_tokens: int | None = 256  # None: as many as the context allows
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False  # the text ends with the stop string that ended it
    bad_words: tuple[str, ...] = ()  # texts that may not appear; their ids are put into `banned_ids`
    banned_ids: tuple[tuple[int, ...], ...] = ()  # sequences of ids that may not appear
    allowed_token_ids: tuple[int, ...] = ()  # the only ids that may appear; empty: all may
    logprobs: int | None = None  # report each output token's logprob and this many alternatives
    prompt_logprobs: int | None = None  # report each prompt token's logprob and this many alternatives
    n: int = 1  # number of outputs
    best_of: int | None = None  # outputs to generate, to return the n likeliest; beams in beam search
    use_beam_search: bool = False  # keep the best_of (or n) likeliest continuations instead of drawing
    num_speculative_tokens: int | None = None  # most drafts of a step; 0: none; None: the engine's number
    structured: Structured | None = None  # constraint on the text, or a mapping: {"regex": "[0-9]+"}
    reasoning: Reasoning | None = None  # the end of the reasoning that the output begins with

    def __post_init__(self) -> None:
        self._own_collections()
        if self.reasoning is not None:
            object.__setattr__(self, "reasoning", Reasoning.of(self.reasoning))
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # 1/0 would be infinite
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_int("top_k", self.top_k, -1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError.about(
                    "min_tokens",
                    f"is {self.min_tokens} but max_tokens is {self.max_tokens}; "
                    f"lower min_tokens to at most {self.max_tokens} or raise max_tokens",
                )
        if self.seed is not None:
            check_int("seed", self.seed, -MAX_SEED, MAX_SEED)
        if self.num_speculative_tokens is not None:
            check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFTS)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_bool("use_beam_search", self.use_beam_search)
        self._check_sequences()
        self._check_collections()
        self._check_structured()

    def _own_collections(self) -> None:
        """Copy collections, which the caller may still change."""
        wanted = {
            "stop": "a string or a list of strings",
            "stop_token_ids": "a list of token ids",
            "bad_words": "a list of strings",
            "allowed_token_ids": "a list of token ids",
            "banned_ids": "a list of lists of token ids",
        }
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in wanted.items():
            object.__setattr__(self, name, _own_tuple(name, getattr(self, name), what))
        lists = tuple(_own_tuple("banned_ids", each, wanted["banned_ids"]) for each in self.banned_ids)
        object.__setattr__(self, "banned_ids", lists)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError.about(
                "logit_bias", f"must map token ids to numbers, got {_shown(self.logit_bias)}"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_sequences(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, 0, MAX_LOGPROBS)
        check_int("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, 1, MAX_SEQUENCES)
            if self.best_of < self.n:
                raise RequestError.about(
                    "best_of", f"is {self.best_of} but n is {self.n}; best_of must be at least n"
                )
        if not self.use_beam_search:
            return
        if not self.is_greedy or self.has_filters or self.has_penalties or self.logit_bias or self.has_bans:
            raise RequestError(
                "beam search ranks continuations by the model's own logprobs; set temperature=0 and leave "
                "top_k, top_p, min_p, logit_bias, bad_words, allowed_token_ids and the penalties at their "
                "defaults",
                param="use_beam_search",
            )
        if self.reasoning is not None and self.reasoning.max_tokens is not None:
            limit = f"a limit of {self.reasoning.max_tokens} tokens on reasoning"
            raise RequestError.about("use_beam_search", f"cannot be combined with {limit}; leave out one")
        if self.logprobs is not None:
            raise RequestError(
                "beam search reports the logprob of a whole output, not of its tokens; leave logprobs unset",
                param="logprobs",
            )

    def _check_collections(self) -> None:
        limits = {
            "stop": (MAX_STOP_STRINGS, "strings"),
            "stop_token_ids": (MAX_STOP_TOKEN_IDS, "ids"),
            "logit_bias": (MAX_LOGIT_BIAS, "entries"),
            "allowed_token_ids": (MAX_ALLOWED_IDS, "ids"),
            "bad_words": (MAX_BAD_WORDS, "strings"),
            "banned_ids": (2 * MAX_BAD_WORDS, "lists"),
        }
        for name, (limit, what) in limits.items():
            if (count := len(getattr(self, name))) > limit:
                raise RequestError.about(name, f"has {count} {what}, at most {limit} are allowed")
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LEN:
                    raise RequestError.about(
                        name, f"must hold strings of 1 to {MAX_STOP_LEN} characters, got {_shown(text)}"
                    )
        for word in self.banned_ids:
            if not 0 < len(word) <= MAX_BANNED_IDS:
                raise RequestError.about("banned_ids", f"must hold lists of 1 to {MAX_BANNED_IDS} ids")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for i, token_id in enumerate(getattr(self, name)):
                check_int(f"{name}[{i}]", token_id, 0)
        for token_id in (each for word in self.banned_ids for each in word):
            check_int("banned_ids", token_id, 0)
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias", token_id, 0)
            _check_range(f"logit_bias.{token_id}", bias, -100.0, 100.0)

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        given: object = self.structured
        is_class = isinstance(given, type) and hasattr(given, "model_json_schema")  # a class of pydantic
        structured = Structured.of({"json_schema": given} if is_class else given)
        object.__setattr__(self, "structured", structured)
        for name in ("use_beam_search", "ignore_eos"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} cannot be combined with a constraint on the output's text ({structured.kind}): "
                    f"leave out {name} or {structured.param}",
                    param=structured.param,
                )

    @property
    def has_bans(self) -> bool:
        """True if the request names ids that are banned, or the only ones that are allowed."""
        return bool(self.bad_words or self.banned_ids or self.allowed_token_ids)

    @property
    def is_guided(self) -> bool:
        """True if masks restrict the next token: of a constraint, a limit on reasoning, or bans."""
        has_limit = self.reasoning is not None and self.reasoning.max_tokens is not None
        return self.structured is not None or has_limit or self.has_bans

    @property
    def num_sequences(self) -> int:
        """The number of sequences to generate, of which `n` are returned."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def num_reported(self) -> int:
        """The number of outputs reported: all that are drawn, but only the n best of a beam search."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def is_greedy(self) -> bool:
        """True if the largest logit is taken, with no draw."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_filters(self) -> bool:
        """True if top-k, top-p or min-p can remove a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """True if tokens that occurred before get other logits."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @classmethod
    def from_knobs(cls, **knobs: object) -> SamplingParams:
        """Build from loosely typed keywords."""
        return cls(**knobs)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """The logprob of one chosen token, its rank (1 = likeliest) and the likeliest alternatives, in order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # `not (low <= value)` and not `value < low`: NaN fails every comparison
    if not (is_number and low <= value <= high) or (low_open and value == low):
        bracket = "(" if low_open else "["
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)  # a JSON reader may have turned 3 into 3.0
        raise RequestError.about(
            name, f"must be a number in {bracket}{low:g}, {high:g}], got {_shown(value)}"
        )


def check_int(name: str, value: int, low: int, high: int = MAX_INT) -> None:
    """Refuse a value that is not an integer from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        spelled = {MAX_INT: "2^63 - 1", -MAX_INT: "-2^63 + 1"}
        allowed = f"[{spelled.get(low, low)}, {spelled.get(high, high)}]"
        raise RequestError.about(name, f"must be an integer in {allowed}, got {_shown(value)}")


def _check_bool(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise RequestError.about(name, f"must be true or false, got {_shown(value)}")


def _own_tuple(name: str, value: Collection[T], wanted: str) -> tuple[T, ...]:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise RequestError.about(name, f"must be {wanted}, got {_shown(value)}")
    return tuple(value)


def _shown(value: object) -> str:
    """Return a value's repr, cut to about 80 characters, for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a value of type {type(value).__name__} too long to print"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of a request's `index`-th sequence; the first one has the request's seed."""
    return seed + index * 0x5851F42D4C957F2D

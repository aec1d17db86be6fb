"""Every exception this package raises on purpose.

InferError
├── ConfigError             the operator asked for something impossible      -> exit code 2
│   └── NoRoom              weights and steps leave no memory for a KV cache
├── CheckpointError         the files on disk are not what is expected       -> exit code 2
│   └── ModelSourceError    the model could not be found or fetched          -> exit code 2
├── RequestError            the client asked for something impossible        -> HTTP 400 or 422
│   ├── ContextOverflow     prompt + max_tokens does not fit the model
│   ├── MalformedRequest    the body is not what the route reads              -> HTTP 400
│   ├── NameTaken           another model has or is about to have that name  -> HTTP 409
│   ├── TemplateError       the chat template refuses these messages
│   ├── UnknownModel        no model of that name is served
│   │   └── AdapterFailed       an engine could not load the adapter of that name
│   └── UnknownResponse     no response, or item of one, is kept under that id
│       └── UnknownPrevious     the response that a request asks to continue
└── EngineError             a fault of this package                          -> HTTP 500
    ├── BatchFailed         some prompts of a list have no answer; it holds the other answers
    ├── OutOfBlocks         the cache is full and nothing can be evicted
    ├── DeviceLost          the GPU is in an error state that only a new process can leave
    │   └── RanksEnded      another rank of the model has ended; rank 0 has said why
    ├── QueueFull           too many requests are waiting                    -> HTTP 503, try later
    ├── RequestTimeout      the answer was not ready in time                 -> HTTP 504
    └── EngineStopped       the engine loop has ended; every waiter gets this    -> HTTP 503
        └── EngineLost      the engine has ended and will not be started again

A message says what was given, what is allowed and what to do.
Anything else that escapes (AssertionError, KeyError, ...) is a bug in this package.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Self

MIN_ALIKE = 0.75  # share of the letters that two names have in common, in the same order
MIN_BEGUN = 3  # letters of a prefix; a shorter one begins too many names
MAX_VALUE_LEN = 60  # characters of a value in a message
_JSON_WORDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), "null"), (Mapping, "an object"), (list, "a list"), (str, "a string"),
    (bool, "true or false"), ((int, float), "a number"),
)  # fmt: skip


class InferError(Exception):
    """The root: catch this to catch everything this package raises on purpose."""


class ConfigError(InferError):
    """The operator asked for something impossible."""


class NoRoom(ConfigError):
    """Weights and steps leave no memory for a KV cache."""


class CheckpointError(InferError):
    """A file of the model is missing, damaged, or not what its header claims."""


class ModelSourceError(CheckpointError):
    """The model could not be found or fetched."""


class RequestError(InferError):
    """The client asked for something impossible."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the JSON field to blame, echoed in the OpenAI error body

    @classmethod
    def about(cls, param: str, problem: str) -> Self:
        """Return the error of a field, whose message begins with the field's name."""
        return cls(f"{param} {problem}", param=param)

    def of_prompt(self, place: str, param: str) -> Self:
        """Return the error with the caller's names for a prompt: `prompt 1` in the text, `input` as param."""
        if (said := str(self)).startswith("prompt "):
            self.args = (place + said.removeprefix("prompt"), *self.args[1:])
        self.param = param if self.param == "prompt" else self.param
        return self


class ContextOverflow(RequestError):
    """Prompt plus requested output exceeds the context window."""

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        context_len: int,
        *,
        is_least: bool = False,
        model_len: int | None = None,
    ) -> None:
        """Refuse a prompt of `num_prompt_tokens` tokens, or more where counting stopped early (`is_least`).

        `model_len` is the model's own context, where `max_seq_len` may have been set below it.
        """
        room = context_len - num_prompt_tokens
        tokens = "token" if num_prompt_tokens == 1 else "tokens"
        given = f"prompt has {'at least ' if is_least else ''}{num_prompt_tokens} {tokens}"
        if room > 0:
            given += f" and max_tokens is {max_tokens}"
            advice = f"shorten the prompt or set max_tokens <= {room}"
        else:  # no max_tokens would help
            advice = f"shorten the prompt to at most {context_len - 1} tokens"
        super().__init__(
            f"{given}, but {spell_context(context_len)}; {advice}{spell_limit(context_len, model_len)}",
            param="max_tokens" if room > 0 else "prompt",
        )
        self._given = (num_prompt_tokens, max_tokens, context_len, is_least)

    @classmethod
    def in_words(cls, message: str, *, param: str | None) -> ContextOverflow:
        """Return the error with a ready message: a server's, or one about another limit."""
        error = cls.__new__(cls)
        RequestError.__init__(error, message, param=param)
        return error

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of the prompt and of the context; only for an error that this process raised."""
        return self._given[0], self._given[2]

    def of(self, model_len: int) -> ContextOverflow:
        """Return the same error with the model's own context."""
        num_prompt_tokens, max_tokens, context_len, is_least = self._given
        return ContextOverflow(
            num_prompt_tokens, max_tokens, context_len, is_least=is_least, model_len=model_len
        )


class MalformedRequest(RequestError):
    """A request is not JSON, or a field is missing or of the wrong JSON type."""

    @classmethod
    def missing(cls, where: str) -> Self:
        """Return the error of a field that must be given."""
        return cls(f"the required field {where!r} is missing", param=where)


class NameTaken(RequestError):
    """Another model has that name, or is about to."""


class TemplateError(RequestError):
    """The chat template refuses these messages."""


class UnknownModel(RequestError):
    """No model of that name is served."""


class AdapterFailed(UnknownModel):
    """An engine could not load the adapter of that name, for example because its files are gone."""


class UnknownResponse(RequestError):
    """No response, or item of one, is kept under that id for this client."""


class UnknownPrevious(UnknownResponse):
    """The response that a request asks to continue is not kept."""


class EngineError(InferError):
    """The engine could not do what it promised: a fault of this package."""


class BatchFailed(EngineError):
    """Some prompts of a list have no answer; `outputs` holds the other answers, and None for these."""

    def __init__(self, message: str, *, outputs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)  # a RequestOutput or None for each prompt


class OutOfBlocks(EngineError):
    """The cache is full and nothing can be evicted."""


class DeviceLost(EngineError):
    """The GPU is in an error state that only a new process can leave."""

    @classmethod
    def of(cls, when: str, error: Exception) -> DeviceLost:
        """Return the error of a device that failed at a given time, with the driver's reason in one line."""
        return cls(f"the device failed {when}: {str(error).partition(chr(10))[0]}")


class RanksEnded(DeviceLost):
    """Another rank of the model has ended; rank 0 has said why."""


class QueueFull(EngineError):
    """Too many requests are waiting; the same one may be accepted later."""

    @classmethod
    def of(cls, num_waiting: int, max_queue: int) -> QueueFull:
        """Return the error of an engine whose queue holds `num_waiting` sequences."""
        waiting = "1 sequence is" if num_waiting == 1 else f"{num_waiting} sequences are"
        return cls(f"{waiting} waiting and max_queue is {max_queue}; try again later, or raise max_queue")


class RequestTimeout(EngineError):
    """A request took longer than its client or the operator allows."""


class EngineStopped(EngineError):
    """The engine loop has ended; every waiter gets this."""


class EngineLost(EngineStopped):
    """The engine has ended and will not be started again."""


def field_of(given: object, name: str, where: str) -> Any:
    """Return a field that an object of a request must have; `where` is the object's place."""
    if not isinstance(given, Mapping):
        raise MalformedRequest.about(where, f"must be an object, got {json_type(given)}")
    if name not in given:
        raise MalformedRequest.missing(f"{where}.{name}")
    return given[name]


def unknown_field(
    name: object, where: str, known: Collection[str], *, others: Iterable[str] = (), hint: str | None = None
) -> RequestError:
    """Return the error of a field that an object does not take; `where` is the object's path and a dot.

    Without a hint the message ends with the closest name of `known` and `others`, else with all of `known`.
    """
    name = str(name)[:80]  # a caller in Python may have any key
    param = where + name
    advice = closest(name, known, aliases={each: each for each in others}, listed="allowed")
    return RequestError(f"unknown field {param!r}{advice if hint is None else f'; {hint}'}", param=param)


def json_type(value: object) -> str:
    """Return the JSON type of a client's value, in words."""
    words = (word for types, word in _JSON_WORDS if isinstance(value, types))
    return next(words, f"a value of type {type(value).__name__}")


class _JsonRepr(reprlib.Repr):
    """A short form of a JSON value; a string by itself is quoted as names are in messages."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlong = self.maxother = MAX_VALUE_LEN

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802  # the name of the type
        return "null"

    def repr_str(self, value: str, level: int) -> str:
        shown = value[:MAX_VALUE_LEN]
        return repr(shown) if level == self.maxlevel else json.dumps(shown, ensure_ascii=False)


_JSON_REPR = _JsonRepr()


def show_value(value: object) -> str:
    """Return a client's value as JSON, cut to 60 characters.

    The work is bounded too: a misplaced value may be a list of a million numbers.
    """
    try:
        text = _JSON_REPR.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        text = f"a value of type {type(value).__name__} too long to print"
    return shorten(text, MAX_VALUE_LEN)


def shorten(text: str, length: int) -> str:
    """Return the text, or its beginning and three dots if it is longer than `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


def spell_context(context_len: int) -> str:
    """Return the length limit in the words by which client libraries recognise this error."""
    return f"this model's maximum context length is {context_len} tokens"


def spell_limit(context_len: int, model_len: int | None) -> str:
    """Return a last clause if a setting, or the KV cache, allows less than the model does."""
    if model_len is None or model_len <= context_len:
        return ""
    return f" (max_seq_len or the size of the KV cache sets this; the model itself allows {model_len})"


def closest(
    name: str, known: Iterable[str], *, aliases: Mapping[str, str] | None = None, listed: str = ""
) -> str:
    """Return the end of an error message: the known name that `name` most likely misspells.

    Without one it lists all known names after the word `listed`, or nothing if `listed` is empty.
    `aliases` maps the names of other programs to the names here.
    """
    here = list(known)
    names = {each: each for each in here} | dict(aliases or {})
    match = nearest(name, names)
    if match is not None:
        return f"; did you mean {names[match]!r}?"
    return f"; {listed}: {', '.join(here)}" if listed else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the only known name that begins with this one, or the name that it misspells, or None.

    A misspelt name keeps three of four letters in order; a wilder guess would mislead. Case is ignored.
    """
    names = {each.casefold(): each for each in known}
    given = name.casefold()
    begun = [each for each in names if each.startswith(given)]
    if len(given) >= MIN_BEGUN and len(begun) == 1:
        return names[begun[0]]
    matches = difflib.get_close_matches(given, names, n=1, cutoff=MIN_ALIKE)
    return names[matches[0]] if matches else None

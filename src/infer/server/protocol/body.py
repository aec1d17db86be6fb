"""The base of all request bodies: every field that a client sends is accounted for.

Each field falls into one of four groups, and none is dropped silently:

    supported   a field of the body's class
    neutral     known elsewhere; accepted with a value that changes nothing, else rejected with the reason
    ignored     about the client and not about the answer, or without effect on this server or next to
                another field; named in the x-infer-ignored response header
    unknown     rejected with the closest known name, or with the route it belongs to; one that resembles
                nothing is rejected on /v1/completions* and /admin, else ignored (named in header and log)

Types are strict (`"1"` is not a number, nor `true` an integer); null means a missing field.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)

from infer.errors import RequestError, nearest, show_value, unknown_field
from infer.sampling.params import MAX_INT
from infer.server.state import current_record

logger = logging.getLogger(__name__)

MAX_NAME_LEN = 256  # characters of a model's name or a cache salt
MAX_SHOWN_NAME = 60  # characters of an unknown field's name in a header or the log
MAX_UNKNOWN = 20  # most unknown fields of one body that are ignored: comparing each with all names is slow
MAX_LOGGED_NAMES = 1000  # most unknown fields that the log names, once each
_LOGGED: set[str] = set()
_PLACE = re.compile(r"\[\d+\]")
_PLAIN = re.compile(r"[a-z][a-z_]*(\.[a-z][a-z_]*)*")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.$-]")


class Neutral(NamedTuple):
    """A field of other servers: the values that change nothing, and why others are rejected."""

    values: tuple[Any, ...]
    reason: str


class Body(BaseModel):
    """A JSON object whose every field is accounted for."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    neutral: ClassVar[Mapping[str, Neutral]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    elsewhere: ClassVar[Mapping[str, str]] = {}  # fields of other routes, with a hint
    renamed: ClassVar[Mapping[str, str]] = {}  # chat fields: their names in this body
    where: ClassVar[str] = ""  # field of the outer body that has this one, and a dot

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """The fields that were given and have no effect."""
        return self._ignored

    @property
    def spellings(self) -> Mapping[str, str]:
        """Chat fields and sampling parameters, by the names that the client used."""
        return self.renamed

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return a body with these fields, without any that is None."""
        return cls.model_validate({name: value for name, value in fields.items() if value is not None})

    def note_ignored(self, names: Iterable[str]) -> None:
        """Add fields of inner objects that have no effect."""
        self._ignored = tuple(dict.fromkeys((*self._ignored, *names)))

    @model_validator(mode="wrap")
    @classmethod
    def _account_for_fields(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        where = cls.where if info.context is None else info.context["where"]
        kept, ignored = account_for(
            data, cls.model_fields, cls.neutral, cls.ignored, elsewhere=cls.elsewhere, where=where
        )
        made = handler({name: _whole(value) for name, value in kept.items()})
        made._ignored = (*made._ignored, *ignored)
        return made


def _whole(value: Any, depth: int = 2) -> Any:  # depth: prompts are lists in lists
    """Restore an integer of over 64 bits, which the JSON parser reads as a float, for range checks."""
    if isinstance(value, list) and depth and not {float, list}.isdisjoint(map(type, value)):
        return [_whole(each, depth - 1) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) > MAX_INT else value


def account_for(
    data: Mapping[str, Any],
    known: Collection[str],
    neutral: Mapping[str, Neutral] = MappingProxyType({}),
    ignored: Collection[str] = (),
    *,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    where: str = "",
) -> tuple[dict[str, Any], list[str]]:
    """Return the known fields of an object and the names of ignored ones; reject others.

    `where` is the path of the object in the body, ending with a dot.
    """
    kept: dict[str, Any] = {}
    without_effect: list[str] = []
    for name, value in data.items():
        if name in known:
            kept[name] = value
        elif name in ignored:
            without_effect.append(name)
        elif name in neutral:
            check_neutral(where + name, value, neutral[name])
        else:
            others, hint = (*neutral, *ignored), elsewhere.get(name)
            if hint is not None or not pass_over(name, where, (*known, *others)):
                raise unknown_field(name, where, known, others=others, hint=hint)
    return kept, without_effect


def pass_over(name: str, where: str, known: Iterable[str]) -> bool:
    """Return True, and record the name, if an unknown field is ignored; likely misspellings are not.

    The name goes into a header and a log line, so it is truncated and sanitised.
    """
    record = current_record()
    if record is None or not record.is_lenient or len(record.unknown) >= MAX_UNKNOWN:
        return False
    if nearest(name[:MAX_NAME_LEN], known) is not None:
        return False
    shown = _UNSAFE.sub("?", _PLACE.sub("", where) + name[:MAX_SHOWN_NAME])
    record.unknown[shown] = None
    logged = shown if _PLAIN.fullmatch(shown) else "..."  # other names may be a client's data
    if logged not in _LOGGED and len(_LOGGED) < MAX_LOGGED_NAMES:
        _LOGGED.add(logged)
        logger.warning("unknown field ignored field=%s path=%s (logged once)", logged, record.path)
    return True


def check_neutral(name: str, value: Any, neutral: Neutral) -> None:
    """Reject a field of other servers, unless it has a value that changes nothing."""
    if value is None or any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral.values
    ):
        return
    allowed = " or ".join(["null", *map(show_value, neutral.values)])
    raise RequestError.about(
        name, f"is not supported: {neutral.reason}; leave it out ({allowed}), got {show_value(value)}"
    )

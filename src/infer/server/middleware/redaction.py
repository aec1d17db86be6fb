"""Redact error messages for the access log: they must not quote the client's own words.

    the client reads    unknown field 'temprature'; did you mean 'temperature'?
    the log says        the same

    the client reads    model 'tell me about ...' is not served here; served: ...
    the log says        model '...

A message to a client may quote parts of its request, perhaps of a prompt; a log is read by others and stored
for a long time. The table shows what a message may quote, and what is logged instead:

    a value, after the word "got"; the error of a chat template          nothing
    a role; how a body was sent; a content part's type other than text   "..."
    the quoted name of a field, a model or a type                        the name, else nothing from there on
    the param: a path of keys into the body, such as logit_bias.17       the same, else "..."
    a number                                                             the number, "..." from 12 digits on

A name is one word of at most 64 ASCII characters that does not look like a card or phone number, nor like a
key: keys have a known prefix, or 20 letters and digits in a row.
"""

from __future__ import annotations

import re

import orjson

from infer.errors import shorten
from infer.server.state import RequestFailure

MAX_LOGGED_REASON = 300
MAX_NAME_LEN = 64

_DROPPED = re.compile(r",? got .*|(?<=cannot render these messages): .*", re.DOTALL)
_HIDDEN = re.compile(
    r"(?<=\.role is) .*|(?<=content-type) .*|(?<=content-encoding) .*|(?<= has type) (?!'|null;).*", re.DOTALL
)
_LONG_NUMBER = re.compile(r"[0-9](?:[ ._/-]?[0-9]){11,}")
_QUOTED = re.compile(r"""(?<!\w)(?:(['"])(?P<word>[^\s'"]+)\1|(?P<opened>['"]).*)""", re.DOTALL)

_NAME = re.compile(r"(?:[A-Za-z0-9_./-]|\[[0-9]{1,6}\])+")
_NUMBER_IN_NAME = re.compile(r"[0-9-]{12}|(?:[0-9][^A-Za-z0-9]*){9}")  # 8 digits are a date
_KEY_IN_NAME = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:[spr]k|gh[a-z]|github_pat|glpat|xox[a-z]|nvapi)[_-]|akia|aiza|eyj)"
    r"|[A-Za-z0-9]{20}",
    re.IGNORECASE,
)


def redacted_reason(error: RequestFailure) -> str:
    """Return the end of a log line: code and param, if any, and our own part of the message."""
    is_named = error.param is not None and _is_name(error.param)
    said = _hide_quoted(error.message)
    said = _HIDDEN.sub(" ...", _DROPPED.sub("", said))
    if error.param and not is_named:
        said = said.replace(error.param, "...")
    said = _LONG_NUMBER.sub("...", said)
    code = f" code={error.code}" if error.code is not None else ""
    param = f' param="{error.param}"' if is_named else ""
    return f"{code}{param} error={orjson.dumps(shorten(said, MAX_LOGGED_REASON)).decode()}"


def _hide_quoted(message: str) -> str:
    """Return the message up to the first quoted text that is not a name."""
    for found in _QUOTED.finditer(message):
        word = found["word"]
        if word is None or not (_is_name(word) or word == "..."):
            return f"{message[: found.start() + 1]}..."
    return message


def _is_name(text: str) -> bool:
    if len(text) > MAX_NAME_LEN or _NAME.fullmatch(text) is None:
        return False
    return _NUMBER_IN_NAME.search(text) is None and _KEY_IN_NAME.search(text) is None

"""Why a request was refused, as its line in the access log says it.

    the client reads    role is 'tell me about ...', allowed are user, assistant
    the log says        error="role is '..."

A message to a client may quote what it has sent, and that may be a part of a prompt; a log is read by others
and kept for long. Our messages quote at their end, behind the word "got", or between quotation marks. Of
the first nothing is logged; of the second what looks like a name: a field, a model, a route. What a chat
template says about messages is nobody's words that we know, and is left out as a whole.
"""

from __future__ import annotations

import re

import orjson

from infer.server.errors import ApiError

MAX_LOGGED_REASON = 300

_GIVEN = re.compile(r",? got .*|(?<=cannot render these messages): .*", re.DOTALL)
_NAME = r"[\w.:@/\[\]-]{1,80}"
_QUOTED = re.compile(rf"""(?<!\w)(?:(['"])(?:{_NAME}|\.\.\.)\1|(?P<opened>['"]).*)""", re.DOTALL)


def spell_reason(error: ApiError) -> str:
    """The end of a log line: code and param, where there are such, and what of the message is ours."""
    said = _QUOTED.sub(lambda found: f"{found['opened']}..." if found["opened"] else found[0], error.message)
    said = _GIVEN.sub("", said)
    if len(said) > MAX_LOGGED_REASON:
        said = said[: MAX_LOGGED_REASON - 3] + "..."
    code = f" code={error.code}" if error.code is not None else ""
    has_param = error.param is not None and re.fullmatch(_NAME, error.param)
    param = f' param="{error.param}"' if has_param else ""
    return f"{code}{param} error={orjson.dumps(said).decode()}"

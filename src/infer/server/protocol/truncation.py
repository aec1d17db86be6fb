"""Choose which items of a conversation to drop, and in which order, if its prompt does not fit.

    developer   user, assistant   user, call, output   user   call, output   call, output
    kept        └─── first ───┘   └──── second ────┘   kept   └─ third ──┘   kept: it is answered

Whole turns are dropped first, oldest first, then steps after the user's last message. A call and its result
are dropped together, with the reasoning before them. All system and developer messages are kept, and so are
the user's last message and the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def find_units(items: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return groups of indices of items that are dropped together, in order."""
    num_items = len(items)
    is_output = [item.get("type") == "function_call_output" for item in items]
    roles = [item.get("role") if item.get("type", "message") == "message" else None for item in items]
    is_user = [role == "user" for role in roles]
    end = num_items - is_user[::-1].index(True) if any(is_user) else 0  # index after the user's last message
    begin = end
    while begin and is_user[begin - 1]:
        begin -= 1
    whole = _whole_cuts(items)
    # indices at which a turn of the user begins, and at which a step after the last turn begins
    turns = [i for i in range(begin + 1) if i in (0, begin) or (is_user[i] and not is_user[i - 1])]
    steps = [i for i in range(end, num_items) if i == end or (is_output[i - 1] and not is_output[i])]
    units = [
        [i for i in range(first, last) if roles[i] not in ("system", "developer")]
        for cuts in (turns, steps)
        for first, last in pairwise([cut for cut in cuts if whole[cut]])
    ]
    return [unit for unit in units if unit]


def _whole_cuts(items: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return, for each cut before an item or after the last, True if it separates no call from its result."""
    results = {
        item["call_id"]: i for i, item in enumerate(items) if item.get("type") == "function_call_output"
    }
    furthest, whole = -1, []
    for i, item in enumerate(items):
        whole.append(furthest < i)
        if item.get("type") == "function_call":
            furthest = max(furthest, results.get(item.get("call_id"), -1))
    return [*whole, furthest < len(items)]

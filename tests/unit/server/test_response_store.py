"""Stored responses: bounds of the store, owners, and which items a prompt that does not fit may lose."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from infer.server.processes.messages import StoredResponse
from infer.server.protocol.truncation import find_units
from infer.server.response_store import ENTRY_BYTES, ResponseStore, num_bytes_of


def stored(size: int = 3) -> StoredResponse:
    return StoredResponse(b"{}", b"[]", b"x" * size)


def test_ten_thousand_responses_leave_the_newest_thousand() -> None:
    async def go() -> None:
        store = ResponseStore(1000)
        for i in range(10_000):
            await store.put("a", f"resp_{i}", stored())
            assert len(store) <= 1000
        assert len(store) == 1000
        assert store.num_bytes == 1000 * num_bytes_of(stored())
        assert await store.get("a", "resp_8999") is None
        assert await store.get("a", "resp_9000") == stored()

    asyncio.run(go())


def test_bytes_are_bounded_and_what_is_used_stays() -> None:
    async def go() -> None:
        limit = 10 * (ENTRY_BYTES + 1000)
        store = ResponseStore(1000, limit)
        draw = random.Random(0)
        await store.put("a", "used", stored(10))
        for i in range(2000):
            await store.put("a", f"resp_{i}", stored(draw.randrange(3000)))
            assert store.num_bytes <= limit
            assert await store.get("a", "used") is not None
        await store.put("a", "huge", stored(limit))
        assert await store.get("a", "huge") is None
        assert await store.get("a", "used") is not None

    asyncio.run(go())


def test_a_response_is_its_owners_alone() -> None:
    async def go() -> None:
        store = ResponseStore(10)
        await store.put("a", "resp_1", stored())
        assert await store.get("b", "resp_1") is None
        assert not await store.delete("b", "resp_1")
        await store.put("b", "resp_1", stored(9))
        assert await store.get("a", "resp_1") == stored()
        assert await store.delete("a", "resp_1")
        assert await store.get("b", "resp_1") == stored(9)
        await store.put("b", "resp_1", stored(5))
        assert store.num_bytes == num_bytes_of(stored(5))

    asyncio.run(go())


def test_a_store_of_none_keeps_none() -> None:
    async def go() -> None:
        empty = ResponseStore(0)
        await empty.put("a", "resp_1", stored())
        assert len(empty) == 0

    asyncio.run(go())


# -- what may be left out --------------------------------------------------------------------------

USER: dict[str, Any] = {"role": "user", "content": "u"}
SAID: dict[str, Any] = {"role": "assistant", "content": "a"}
RULES: dict[str, Any] = {"type": "message", "role": "developer", "content": "d"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": []}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "o"}


def test_whole_turns_go_first_and_then_steps() -> None:
    turns = [RULES, USER, SAID, USER, THOUGHT, call("1"), output("1"), SAID, USER, USER]
    assert find_units(turns) == [[1, 2], [3, 4, 5, 6, 7]]
    steps = [USER, THOUGHT, call("1"), call("2"), output("1"), output("2"), THOUGHT, call("3"), output("3")]
    assert find_units(steps) == [[1, 2, 3, 4, 5]]
    assert find_units([*turns, call("4"), output("4"), call("5"), output("5")])[2:] == [[10, 11]]


def test_nothing_is_left_out_of_what_must_stay() -> None:
    assert find_units([]) == find_units([USER]) == find_units([RULES, USER, USER]) == []
    assert find_units([USER, call("1"), output("1")]) == []
    crossing = [USER, call("1"), USER, SAID, USER, output("1")]
    assert find_units(crossing) == []


def test_pairs_stay_whole_whatever_the_conversation_is() -> None:
    draw = random.Random(1)
    for _ in range(500):
        numbers, open_calls, items = itertools.count(), list[str](), list[dict[str, Any]]()
        for _ in range(draw.randrange(25)):
            match draw.randrange(6):
                case 0 | 1:
                    open_calls.append(str(next(numbers)))
                    items.append(call(open_calls[-1]))
                case 2 | 3 if open_calls:
                    items.append(output(open_calls.pop(draw.randrange(len(open_calls)))))
                case 4:
                    items.append(draw.choice([SAID, RULES, THOUGHT]))
                case _:
                    items.append(USER)
        units = find_units(items)
        last_user = max((i for i, item in enumerate(items) if item is USER), default=-1)
        for number in range(len(units) + 1):
            dropped = {i for unit in units[:number] for i in unit}
            kept = [item for i, item in enumerate(items) if i not in dropped]
            calls = {item["call_id"] for item in kept if item.get("type") == "function_call"}
            outputs = {item["call_id"] for item in kept if "output" in item}
            whole = {item["call_id"] for item in items if "output" in item}
            assert outputs <= calls
            assert calls & whole <= outputs
            assert last_user not in dropped
            assert [item for item in kept if item is RULES] == [item for item in items if item is RULES]

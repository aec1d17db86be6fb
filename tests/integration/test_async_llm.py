"""`AsyncLLM` on a tiny real model: the same answers as `LLM`, for many callers, each free to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from infer import LLM, AsyncLLM, SamplingParams
from infer.errors import EngineStopped, RequestError

PROMPTS = [f"the {word} of the story is" for word in ("end", "start", "middle", "point", "moral")]
KNOBS: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "block_size": 4, "num_threads": 1}


def test_many_callers_get_what_they_would_get_alone(checkpoint: str) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=20, ignore_eos=True)
    alone = [LLM(checkpoint, **KNOBS).generate(prompt, params)[0].text for prompt in PROMPTS]

    async def main() -> list[str]:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            answers = await asyncio.gather(*(llm.generate(prompt, params) for prompt in PROMPTS))
            return [answer.text for answer in answers]

    assert asyncio.run(main()) == alone


def test_the_pieces_are_the_whole(checkpoint: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)

    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            whole = await llm.generate(PROMPTS[0], params)
            pieces = [piece async for piece in llm.stream(PROMPTS[0], params)]
            assert "".join(piece.text for piece in pieces) == whole.text
            assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
            assert pieces[-1].finish_reason == whole.outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_leaving_a_stream_leaves_nothing_behind(checkpoint: str) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=90, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            answer = await llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=5))
            assert len(answer.token_ids) <= 5
            engine = llm.client._engine  # type: ignore[attr-defined]
            assert engine.num_requests == 0
            assert engine.scheduler.pool.usage().num_used == 0

    asyncio.run(main())


def test_a_stop_string_ends_the_request_in_the_engine_too(checkpoint: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = LLM(checkpoint, **KNOBS).generate(PROMPTS[0], params)[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]

    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            stopping = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,))
            answer = await llm.generate(PROMPTS[0], stopping)
            assert answer.text == whole[: whole.index(stop)]
            assert answer.outputs[0].stop_reason == stop
            assert len(answer.token_ids) < 40

    asyncio.run(main())


def test_what_cannot_stream_says_so(checkpoint: str) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            with pytest.raises(RequestError, match="cannot stream"):
                await anext(llm.stream(PROMPTS[0], SamplingParams(n=1, best_of=2)))

    asyncio.run(main())


MESSAGES = [{"role": "user", "content": "hello"}]
SEVERAL: list[tuple[Callable[[Any], Awaitable[Any]], int]] = [
    (lambda llm: llm.generate(["a", "b"]), 2),
    (lambda llm: llm.generate([[1, 2, 3]]), 1),
    (lambda llm: anext(llm.stream(["a", "b"])), 2),
    (lambda llm: llm.chat(["a", "b", "c"]), 3),
    (lambda llm: llm.chat([MESSAGES, MESSAGES]), 2),
    (lambda llm: anext(llm.stream_chat([MESSAGES])), 1),
    (lambda llm: llm.embed(("a", "b")), 2),
]


def test_several_prompts_are_told_to_come_one_by_one(checkpoint: str) -> None:
    async def main() -> None:
        async with AsyncLLM(checkpoint, **KNOBS) as llm:
            for call, number in SEVERAL:
                says = f"AsyncLLM takes one prompt per call, got a list of {number}; use asyncio.gather"
                with pytest.raises(RequestError, match=says):
                    await call(llm)
            one = SamplingParams(max_tokens=1)
            for prompt in ([1, 2, 3], (1,), "text"):
                assert len((await llm.generate(prompt, one)).token_ids) == 1
            assert len((await llm.chat(MESSAGES, one)).token_ids) == 1

    asyncio.run(main())


def test_a_closed_model_says_so(checkpoint: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(checkpoint, **KNOBS)
        await llm.close()
        await llm.close()
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: llm.generate("x"),
            lambda: anext(llm.stream("x")),
            lambda: llm.chat("x"),
            lambda: llm.embed("x"),
        ]
        for call in calls:
            with pytest.raises(EngineStopped, match="this AsyncLLM was closed; make another one"):
                await call()

    asyncio.run(main())

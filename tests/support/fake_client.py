"""An engine client without an engine: it answers with numbers, at a pace and with troubles of choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from infer.engine.live import STEP_COLUMNS, LiveSnapshot
from infer.engine.stats import EngineStats
from infer.engine.stories import EngineStory
from infer.errors import EngineError, NameTaken
from infer.finish_reason import FinishReason
from infer.scheduling.request import Request, StepOutput


def fake_snapshot(number: int, fields: dict[str, Any]) -> LiveSnapshot:
    """A snapshot of an engine with eight free blocks and as many steps as `number`; `fields` differ."""
    steps = np.zeros((number, len(STEP_COLUMNS)), dtype=np.int64)
    steps[:, 0] = range(1, number + 1)
    plain: dict[str, Any] = dict.fromkeys(LiveSnapshot.__struct_fields__, 0)
    plain |= {"made_at": 1.0, "interval_s": 0.01, "blocks_per_cell": 1, "num_blocks": 8, "block_size": 4}
    plain |= {"counts": (8, 0, 0, 0), "cells": [0, 8], "host_cells": [], "requests": [], "branches": []}
    plain |= {"host_bytes": (3, 2, 1), "number": number, "steps": steps.tobytes()}
    return LiveSnapshot(**(plain | fields))


class FakeClient:
    """Says `max_tokens` tokens per request; the i-th token of an answer is `first_token + i`."""

    def __init__(self, *, delay_s: float = 0.0, first_token: int = 65) -> None:
        self.delay_s = delay_s
        self.first_token = first_token
        self.failure: EngineError | None = None  # why it cannot serve
        self.silent_s = 0.0
        self.prefixes: set[int] = set()
        self.snapshot = EngineStats(num_blocks=8)
        self.requests: list[Request] = []
        self.num_open = 0
        self.num_resets = 0
        self.adapters: dict[str, str] = {}
        self.num_looks = 0
        self.sight: dict[str, Any] = {}  # fields of the snapshots it shows
        self.aborted: list[tuple[str, int | None]] = []
        self.is_closed = False

    async def generate(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            if self.failure is not None:
                raise self.failure
            if request.pooling is not None:
                yield StepOutput(
                    request.request_id,
                    0,
                    (),
                    finish_reason=FinishReason.STOP,
                    embedding=(float(len(request.prompt)),),
                )
                return
            num_tokens = request.params.max_tokens or 1
            for i in range(num_tokens):
                await asyncio.sleep(self.delay_s)
                for index in range(request.params.n):
                    yield StepOutput(
                        request_id=request.request_id,
                        index=index,
                        token_ids=(self.first_token + i,),
                        finish_reason=FinishReason.LENGTH if i == num_tokens - 1 else None,
                        num_cached=min(4, len(request.prompt)),
                    )
        finally:
            self.num_open -= 1

    def has_taken(self, request_id: str) -> bool:
        return True

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    def stats(self) -> EngineStats:
        return self.snapshot

    async def reset_prefix_cache(self) -> int:
        self.num_resets += 1
        return 3

    async def set_adapter(self, name: str, path: str | None, *, replaces: bool = False) -> None:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if name in self.adapters and path is not None and not replaces:
            raise NameTaken(f"an adapter {name!r} is loaded already")
        if path is None:
            self.adapters.pop(name)
        else:
            self.adapters[name] = path

    async def explain(self, request_id: str) -> EngineStory | None:
        return None

    async def look(self) -> LiveSnapshot:
        self.num_looks += 1
        if self.failure is not None:
            raise self.failure
        return fake_snapshot(self.num_looks, self.sight)

    async def close(self, reason: str = "") -> None:
        self.is_closed = True

"""An engine on a GPU that sleeps: the device is free, and the next one on the same weights answers alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer.client.process import load_engine
from infer.client.sleeping import SleepingEngine
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES

pytestmark = pytest.mark.gpu


def answer(engine: Engine) -> list[int]:
    while engine.prepare():
        pass
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.add(Request(request_id="a", prompt=tuple(range(10, 90)), params=params))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_an_engine_sleeps_and_wakes(quantization: str, tmp_path: Path) -> None:
    sizes = Sizes(hidden_size=512, vocab_size=1024, num_layers=2, num_heads=8)
    make_checkpoint("qwen3", tmp_path, sizes=sizes, dtype="bfloat16", seed=3)
    knobs: dict[str, Any] = {"model": str(tmp_path), "device": "cuda", "num_blocks": 20_000, **FEW_SIZES}
    before = torch.cuda.memory_allocated()
    engine = load_engine(EngineConfig.from_knobs(quantization=quantization, **knobs))
    first = answer(engine)
    awake = torch.cuda.memory_allocated()
    weights, places = None, list[int]()
    for turn in range(3):
        sleeping = SleepingEngine(engine, weights)
        del engine
        assert sleeping.keep_weights(1) > 0 and not sleeping._has_left, "they do not fit into a byte"
        assert sleeping.keep_weights(1 << 40) > 0
        assert torch.cuda.memory_allocated() < before + (awake - before) // 4, "the device is not free"
        weights = sleeping.weights
        assert weights is not None
        places.append(sum(copy.data_ptr() for copy in weights._copies))
        engine = sleeping.wake()
        assert weights.num_pinned > 0
        if turn == 1:
            assert len(set(places)) == 1, "the pinned memory of the first sleep is used again"
            weights.drop_pinned()
            assert weights.num_pinned == 0
        assert answer(engine) == first

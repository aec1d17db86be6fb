"""An engine on a GPU that sleeps: the device is free, and the next one on the same weights answers alike."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from infer.client.process import SleepingEngine, load_engine
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint

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


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen3", "none"), ("gemma3", "none"), ("qwen3", "int4"), ("qwen3_moe", "fp8")],
)
def test_an_engine_sleeps_and_wakes(family: str, quantization: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, sizes=Sizes(hidden_size=512, vocab_size=1024, num_layers=2), seed=3)
    knobs = {"model": str(tmp_path), "device": "cuda", "quantization": quantization, "device_memory": "6GiB"}
    make = partial(load_engine, EngineConfig.from_knobs(**knobs))
    before = torch.cuda.memory_allocated()
    engine = make()
    first = answer(engine)
    for _ in range(2):
        sleeping = SleepingEngine(engine)
        del engine
        num_bytes = sleeping.keep_weights(1 << 40)
        assert num_bytes > 0
        assert torch.cuda.memory_allocated() <= before + (64 << 20), "the device is not free"
        started = time.perf_counter()
        engine = sleeping.wake()
        assert answer(engine) == first
        print(f"{family} {quantization} back after {time.perf_counter() - started:.2f} s")

"""Tiny models of every family, loaded as a user would load them, and engines around them."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.execution.gpu.device import GpuDevice
from infer.execution.torch_device import TorchDevice
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request, StepOutput
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.books import check_books
from tests.support.kv_store import fill_store

VOCAB_SIZE = 300
CONTEXT_LEN = 60
SIZES = Sizes(vocab_size=VOCAB_SIZE, context_len=CONTEXT_LEN)  # sliding windows are 16 tokens


@functools.cache
def tiny_model(family: str) -> LoadedModel:
    """A random model of a family, in float32."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / family
        make_checkpoint(family, path, sizes=SIZES, seed=1)
        return load_model(
            resolve_model(str(path), revision=None, show_progress=False), dtype="float32", device="cpu"
        )


def make_engine(family: str = "llama", *, observer: EngineObserver | None = None, **knobs: Any) -> Engine:
    """An engine whose cache holds NaN wherever nothing was written."""
    config = EngineConfig.from_knobs(**({"num_blocks": 64} | knobs))
    engine = build_engine(config, tiny_model(family), observer=observer)
    device = engine._device
    assert isinstance(device, TorchDevice | GpuDevice)
    fill_store(device.store, float("nan"))
    return engine


def run_engine(
    engine: Engine, requests: Iterable[tuple[Sequence[int], SamplingParams]]
) -> list[list[list[int]]]:
    """Serve (prompt, params) together; the output tokens of each, by index. Nothing may fail or leak."""
    wanted = list(requests)
    for number, (prompt, params) in enumerate(wanted):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    outputs = drain(engine)
    widths = [p.n if p.use_beam_search else p.num_sequences for _, p in wanted]
    made: list[list[list[int]]] = [[[] for _ in range(width)] for width in widths]
    for output in outputs:
        assert output.finish_reason != "error", output
        made[int(output.request_id)][output.index].extend(output.token_ids)
    return made


def drain(engine: Engine, max_steps: int = 5000) -> list[StepOutput]:
    """Step until nothing is left, then look at the books."""
    outputs: list[StepOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            break
        outputs += engine.step()
    pool = engine.scheduler.pool
    check_books(pool)
    assert not engine.has_work
    assert pool.audit_blocks() == []
    assert pool.usage().num_used == 0
    return outputs


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Prompts of many lengths, half of which begin like another; whole blocks of 16 are among them."""
    rng = random.Random(seed)
    starts = [[rng.randrange(VOCAB_SIZE) for _ in range(longest)] for _ in range(2)]
    prompts = []
    for number in range(count):
        length = (16, 32, 1)[number] if number < 3 else rng.randrange(1, longest + 1)
        shared = starts[number % 2][: rng.randrange(length + 1)] if rng.random() < 0.5 else []
        prompts.append(shared + [rng.randrange(VOCAB_SIZE) for _ in range(length - len(shared))])
    return prompts


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    """Always the likeliest token, never ended by the model."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def is_close(ours: float, theirs: torch.Tensor) -> bool:
    """Equal to what float32 allows for a logprob computed in another order."""
    return abs(ours - float(theirs)) < 2e-4

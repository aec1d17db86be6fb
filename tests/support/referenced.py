"""Tiny models next to their references, which check a greedy output by one forward pass over all of it."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch

from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.execution.gpu.device import GpuDevice
from infer.execution.torch_device import TorchDevice
from infer.loader.find.source import resolve_model
from infer.loader.load import LoadedModel, load_model
from infer.sampling.params import SamplingParams
from infer.speculative.adaptive import StepCosts
from tests.support.checkpoints import reference_model
from tests.support.kv_store import fill_store
from tests.support.tiny import run_engine

# drafts pay, if some are right; timing steps at a start would take longer than serving what tests ask
COSTS = StepCosts(((1, 1e-3), (128, 4e-3)), gap_s=1e-9)


def load_pair(family: str, **changes: Any) -> tuple[Any, LoadedModel]:
    """The reference, and the same weights loaded as a user would load them."""
    reference = reference_model(family, **changes)
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        source = resolve_model(directory, revision=None, show_progress=False)
        return reference, load_model(source, dtype="float32", device="cpu")


def engine_of_nan(loaded: LoadedModel, **knobs: Any) -> Engine:
    """An engine whose store is full of NaN, so that what is read and was not written shows."""
    engine = build_engine(EngineConfig.from_knobs(**knobs), loaded, step_costs=COSTS)
    assert isinstance(engine._device, TorchDevice | GpuDevice)
    fill_store(engine._device.store, float("nan"))
    return engine


@functools.cache  # engines that are right come to the same texts
def likeliest(reference: Any, text: tuple[int, ...]) -> list[int]:
    """The token that a reference finds likeliest after each of a text's."""
    with torch.no_grad():
        found: list[int] = reference(input_ids=torch.tensor([text])).logits[0].argmax(-1).tolist()
    return found


def check_output(reference: Any, prompt: list[int], output: list[int]) -> None:
    """Raise unless each token of an output is what the reference finds likeliest after those before it."""
    assert likeliest(reference, (*prompt, *output))[len(prompt) - 1 : -1] == output


def serve_checked(engine: Engine, reference: Any, requests: list[tuple[list[int], SamplingParams]]) -> None:
    """Serve greedy requests and check what each of them got."""
    for (prompt, params), (output,) in zip(requests, run_engine(engine, requests), strict=True):
        assert len(output) == params.max_tokens
        check_output(reference, prompt, output)

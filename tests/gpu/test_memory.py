"""Memory on a real GPU: plans against measurements, limits that hold, a neighbour that takes the rest.

    python -m pytest tests/gpu/test_memory.py -q                    about a minute on an H200
    MEMORY_SHAPES=0.6B,1B,8B python -m pytest tests/gpu/test_memory.py -q     all shapes

A test that failed leaves its frames, and with them an engine, in the interpreter's last traceback. Each test
begins by forgetting it: what one could not free does not make the next fail.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import make_requests, neighbour, serve
from infer.cache.memory import GPU_RUNTIME_BYTES, StepBytes
from infer.config.settings import EngineConfig
from infer.engine import device_build, rehearsal
from infer.engine.build import build_engine
from infer.engine.cache_fit import compute_step
from infer.engine.device_build import resolve_for
from infer.engine.device_memory import Arena
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.device import StepResult
from infer.execution.halves import SmallerSteps
from infer.execution.order import StepOrder
from infer.layers.bind import bind
from infer.loader.load import LoadedModel
from infer.loader.random_weights import load_random
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.books import check_books

pytestmark = pytest.mark.gpu

GIB = 1 << 30
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "vocab_size": 128256,
    "head_dim": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
}  # fmt: skip
CHOSEN = os.environ.get("MEMORY_SHAPES", "0.6B").split(",")
FEW: dict[str, Any] = {"max_batch_size": 64, "max_num_batched_tokens": 4096}  # captured in a few seconds


@pytest.fixture(scope="module", params=CHOSEN)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("shape") / str(request.param)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | SHAPES[request.param]))
    yield load_random(folder, dtype="bfloat16", device="cuda")
    _free()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    _free()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    _free()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def ready(engine: Engine) -> Engine:
    while engine.prepare():
        pass
    return engine


def reserved_by_pool() -> Counter[tuple[int, int]]:
    """Bytes that PyTorch's allocator holds, by pool: (0, 0) is everyone's, another that of captured steps."""
    held: Counter[tuple[int, int]] = Counter()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        held[tuple(segment["segment_pool_id"])] += segment["total_size"]
    return held


def spare_bytes() -> int:
    """Bytes that PyTorch's allocator holds and has free."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def count_repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that found no memory, from now on."""
    repeated: list[int] = []
    run = SmallerSteps.run

    def counted(self: SmallerSteps, order: StepOrder, *rest: Any) -> StepResult:
        repeated.append(order.step)
        return run(self, order, *rest)

    monkeypatch.setattr(SmallerSteps, "run", counted)
    return repeated


def test_the_computed_step_is_at_least_the_measured_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`infer plan` may count too much, by less than three times, and never too little."""
    monkeypatch.setattr(rehearsal, "GAP_FACTOR", 1.0)
    config = resolve_for(EngineConfig(), loaded)
    computed = compute_step(config, loaded)
    bound = bind(loaded.model, loaded.device, deterministic=False)
    measured = device_build.DeviceBuild(config, loaded, None, None).rehearse(bound)
    assert measured is not None
    print(f"computed {computed} measured {measured}")
    assert measured.layers <= computed.layers < 3 * measured.layers
    assert measured.logits == computed.logits, "the device's sampler takes less than what is computed"
    assert measured.graphs <= 1.2 * computed.graphs
    assert measured.buffers <= 4 * computed.buffers + (64 << 20)


def test_graphs_take_no_more_than_was_left_for_them(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[StepBytes] = []

    def rehearse(*given: Any) -> StepBytes:
        steps.append(rehearsal.rehearse(*given))
        return steps[0]

    monkeypatch.setattr(device_build, "rehearse", rehearse)
    engine = build_engine(EngineConfig.from_knobs(num_blocks=1024), loaded)
    before, allocated = reserved_by_pool(), torch.cuda.memory_allocated()
    ready(engine)
    grown = reserved_by_pool()
    grown.subtract(before)
    taken = {pool: f"{num_bytes >> 20} MiB" for pool, num_bytes in grown.items() if num_bytes}
    kept = torch.cuda.memory_allocated() - allocated
    print(f"planned {steps[0].graphs >> 20} MiB, taken by pool {taken}, tensors {kept >> 20} MiB")
    assert not engine._device.graphs._uncaptured  # type: ignore[attr-defined]
    assert sum(grown.values()) <= steps[0].graphs, f"planned {steps[0]}, taken by pool {taken}"


@pytest.mark.parametrize("limit", ["8GiB", "24GiB"])
def test_a_limit_holds_under_load_or_the_start_is_refused(loaded: LoadedModel, limit: str) -> None:
    try:
        engine = ready(build_engine(EngineConfig.from_knobs(device_memory=limit, **FEW), loaded))
    except ConfigError as error:
        print(f"refused: {error}")
        assert "device_memory" in str(error)
        return
    found = serve(engine, make_requests(engine, 120, 1000, "r"))
    assert found["num_errors"] == 0, found
    held = torch.cuda.memory_reserved() + GPU_RUNTIME_BYTES
    assert held <= int(limit.removesuffix("GiB")) * GIB, f"{held >> 20} MiB, {reserved_by_pool()}"
    check_books(engine.scheduler.pool)


@pytest.mark.whole_card
def test_a_neighbour_that_takes_everything_costs_no_request(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = count_repeated(monkeypatch)
    engine = ready(build_engine(EngineConfig.from_knobs(device_memory="0.5", **FEW), loaded))
    reserved = reserved_by_pool()
    with neighbour("0B"):
        free = torch.cuda.mem_get_info()[0]
        assert free < 64 << 20, f"the neighbour left {free >> 20} MiB: did it start?"
        found = serve(engine, make_requests(engine, 120, 1000, "r"))
    print(f"served {found}, repeated {repeated}, reserved before {reserved}, after {reserved_by_pool()}")
    assert found["num_errors"] == 0, found
    assert repeated == [], f"every step found its memory in the arena; {reserved} -> {reserved_by_pool()}"
    assert reserved_by_pool().total() >= reserved.total(), f"given back: {reserved} -> {reserved_by_pool()}"


@pytest.mark.whole_card
def test_an_arena_is_kept_when_memory_runs_out(loaded: LoadedModel) -> None:
    before = spare_bytes()  # most of it gaps between weights, which are kept with them
    arena = Arena(GIB, loaded.device)
    with neighbour("0B"):
        with pytest.raises(torch.OutOfMemoryError):  # PyTorch gives back all it can before that
            torch.empty(200 * GIB, dtype=torch.uint8, device=loaded.device)
        torch.cuda.empty_cache()
        pieces = [torch.empty(96 << 20, dtype=torch.uint8, device=loaded.device) for _ in range(9)]
        small = [torch.empty(1000, device=loaded.device) for _ in range(100)]
    assert len(pieces) + len(small) == 109
    del pieces, small, arena
    _free()
    grown = spare_bytes() - before
    assert grown <= 0, f"it is gone with its engine; {grown >> 20} MiB more than before are held"


def test_without_an_arena_steps_are_repeated_and_no_request_is_lost(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = count_repeated(monkeypatch)
    engine = build_engine(EngineConfig.from_knobs(num_blocks=4096, use_cuda_graphs=False), loaded)
    ready(engine)
    engine._device.arena = None  # type: ignore[attr-defined]
    _free()
    room = 256 << 20
    fraction = (torch.cuda.memory_reserved() + room) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(fraction)
    found = serve(engine, make_requests(engine, 40, 1000, "r"))
    assert found["num_errors"] == 0, found
    assert repeated, f"256 MiB are too few for the largest steps; {reserved_by_pool()}"
    check_books(engine.scheduler)


@pytest.mark.whole_card
@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": "float32", "deterministic": True, "num_blocks": 512},
        {"dtype": "bfloat16", "num_blocks": 512},
        {"dtype": "bfloat16", "num_blocks": 120, "preemption": "swap", "swap_space": "64MiB"},
    ],
    ids=["deterministic", "fast", "swap"],
)
def test_features_used_first_beside_a_neighbour_need_no_memory_of_the_card(
    knobs: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint("qwen2", tmp_path / "tiny", sizes=Sizes(context_len=1024))
    command = [sys.executable, "-m", "tests.support.first_uses", str(tmp_path / "tiny"), json.dumps(knobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]

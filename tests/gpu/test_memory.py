"""Memory on a real GPU: plans against measurements, limits that hold, a neighbour that takes the rest."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.memory import make_requests, neighbour, serve
from infer.cache.memory import GPU_RUNTIME_BYTES, StepBytes
from infer.config.settings import EngineConfig
from infer.engine import build, rehearsal
from infer.engine.build import build_engine, resolve_for
from infer.engine.cache_fit import compute_step
from infer.engine.device_memory import Arena
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.halves import SmallerSteps
from infer.execution.runner import StepResult
from infer.layers.bind import bind
from infer.loader.load import LoadedModel
from infer.loader.random_weights import load_random
from infer.scheduling.plan import StepPlan

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


@pytest.fixture(scope="module", params=SHAPES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("shape") / str(request.param)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | SHAPES[request.param]))
    yield load_random(folder, dtype="bfloat16", device="cuda")
    _free()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
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


def count_repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that found no memory, from now on."""
    repeated: list[int] = []
    run = SmallerSteps.run

    def counted(self: SmallerSteps, plan: StepPlan, *rest: Any) -> StepResult:
        repeated.append(plan.step)
        return run(self, plan, *rest)

    monkeypatch.setattr(SmallerSteps, "run", counted)
    return repeated


def test_the_computed_step_is_at_least_the_measured_one(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`infer plan` may count too much, by less than three times, and never too little."""
    monkeypatch.setattr(rehearsal, "GAP_FACTOR", 1.0)
    config = resolve_for(EngineConfig(), loaded)
    computed = compute_step(config, loaded)
    measured = build._rehearse(config, loaded, bind(loaded.model, loaded.device, deterministic=False))
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

    monkeypatch.setattr(build, "rehearse", rehearse)
    engine = build_engine(EngineConfig.from_knobs(num_blocks=1024), loaded)
    before = torch.cuda.memory_reserved()
    ready(engine)
    grown = torch.cuda.memory_reserved() - before
    print(f"graphs planned {steps[0].graphs >> 20} MiB, taken {grown >> 20} MiB")
    assert grown <= steps[0].graphs + (64 << 20)
    assert not engine._runner._graphs._uncaptured  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", ["8GiB", "12GiB", "24GiB"])
def test_a_limit_holds_under_load_or_the_start_is_refused(loaded: LoadedModel, limit: str) -> None:
    try:
        engine = ready(build_engine(EngineConfig.from_knobs(device_memory=limit), loaded))
    except ConfigError as error:
        print(f"refused: {error}")
        assert "device_memory" in str(error)
        return
    found = serve(engine, make_requests(engine, 300, 1000, "r"))
    assert found["num_errors"] == 0
    held = torch.cuda.memory_reserved() + GPU_RUNTIME_BYTES
    assert held <= int(limit.removesuffix("GiB")) * GIB
    engine.scheduler.pool.check()


def test_a_neighbour_that_takes_everything_costs_no_request(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = count_repeated(monkeypatch)
    engine = ready(build_engine(EngineConfig.from_knobs(device_memory="0.5"), loaded))
    reserved = torch.cuda.memory_reserved()
    with neighbour("0B"):
        assert torch.cuda.mem_get_info()[0] < 64 << 20
        found = serve(engine, make_requests(engine, 200, 1000, "r"))
    assert found["num_errors"] == 0
    assert repeated == [], "every step found its memory in the arena"
    assert torch.cuda.memory_reserved() >= reserved, "nothing was given back"


def test_an_arena_is_kept_when_memory_runs_out(loaded: LoadedModel) -> None:
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
    spare = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert spare < 64 << 20, "it is gone with its engine"


def test_without_an_arena_steps_are_repeated_and_no_request_is_lost(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = count_repeated(monkeypatch)
    engine = build_engine(EngineConfig.from_knobs(num_blocks=4096, use_cuda_graphs=False), loaded)
    ready(engine)
    engine._runner.arena = None  # type: ignore[attr-defined]
    _free()
    room = 256 << 20
    fraction = (torch.cuda.memory_reserved() + room) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(fraction)
    found = serve(engine, make_requests(engine, 60, 1000, "r"))
    assert found["num_errors"] == 0
    assert repeated, "256 MiB are too few for the largest steps"
    engine.scheduler.check()

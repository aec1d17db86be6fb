"""LoRA adapters of a model that ranks share: every request gets what one process gives it.

Ranks are threads here (tests/support/rank_threads.py); the device half of a GPU runs on the references.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from infer import LLM
from infer.client import load
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.engine import Engine
from infer.errors import CheckpointError, ConfigError, UnknownModel
from infer.kernels.cpu.collectives import SharedCommunicator
from infer.loader.adapter import cut_pair
from infer.loader.formats.checkpoint import write_safetensors
from infer.loader.slices import Rank
from infer.tools.memory_needs import find_headers, find_machine
from infer.tools.memory_plan import plan_memory
from scripts.make_checkpoint import make_checkpoint
from tests.integration.test_adapters import (
    MIXED,
    OUTER,
    PROMPTS,
    ROOT,
    SIZES,
    _stored,
    adapter,
    base,
    expected,
    make_engine,
    modules,
    serve,
)
from tests.support.adapters import make_adapter, read_weights
from tests.support.rank_threads import RankThreads


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    ROOT.append(tmp_path_factory.mktemp("adapters"))


def _first(ranks: SharedCommunicator, x: torch.Tensor) -> None:
    """`GpuCommunicator.first` for ids on a CPU."""
    x.copy_(ranks.all_reduce(x.float() if ranks.rank == 0 else torch.zeros_like(x, dtype=torch.float32)))


@pytest.fixture(autouse=True)
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RankProcesses", RankThreads)
    monkeypatch.setattr(SharedCommunicator, "first", _first, raising=False)
    monkeypatch.setattr(SharedCommunicator, "alone", lambda ranks: nullcontext(), raising=False)
    monkeypatch.setattr(SharedCommunicator, "pass_ids", lambda ranks, ids: None, raising=False)


@contextmanager
def engine_of(path: Path, size: int, **knobs: Any) -> Iterator[Engine]:
    defaults: dict[str, Any] = {
        "device": "cpu", "quantization": "none", "num_blocks": 128, "block_size": 4, "record_cpu_step": False,
        "dtype": "float32",
    }  # fmt: skip
    with LLM(path, tensor_parallel_size=size, **(defaults | knobs)) as llm:
        yield llm.engine


@pytest.mark.parametrize(
    ("family", "size", "on_gpu"),
    [
        ("llama", 2, False),
        ("llama", 2, True),
        ("qwen3_moe", 2, False),
        ("gpt2", 2, False),  # one A for q, k and v
        ("phi3", 2, False),  # fused in the checkpoint
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("llama", 4, False), ("qwen3_moe", 2, True), ("gemma3", 2, False), ("gpt2", 2, True))
        ),
    ],
)
def test_mixed_batch_of_ranks_says_what_merged_weights_say(
    family: str, size: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {(name, number): expected(family, name)[number] for name, number in MIXED}
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: on_gpu)
    with engine_of(base(family), size, lora_modules=modules(family)) as engine:
        assert serve(engine, MIXED) == wanted
        assert serve(engine, MIXED[:4]) == {pair: wanted[pair] for pair in MIXED[:4]}  # from cached prefixes


def test_ranks_load_replace_and_unload_adapters_while_they_serve() -> None:
    with engine_of(base("llama"), 2, enable_lora=True, max_loras=1) as engine:
        assert serve(engine, [("", 0)])["", 0] == expected("llama", "")[0]
        engine.set_adapter("x", str(adapter("llama", "all")))
        assert serve(engine, [("x", 1), ("", 1)])["x", 1] == expected("llama", "all")[1]
        engine.set_adapter("x", str(adapter("llama", "few")), replaces=True)
        assert serve(engine, [("x", 1), ("", 1)])["x", 1] == expected("llama", "few")[1]
        engine.set_adapter("x", None)
        with pytest.raises(UnknownModel):
            serve(engine, [("x", 1)])
        with pytest.raises(ConfigError, match="rank 20, but max_lora_rank is 16"):
            engine.set_adapter("y", str(adapter("llama", "wide")))
        engine.set_adapter("y", str(adapter("llama", "all")))
        assert serve(engine, [("y", 2)])["y", 2] == expected("llama", "all")[2]


def test_a_rank_that_cannot_read_an_adapter_leaves_all_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(pair: Any, network: Any, rank: Rank) -> Any:
        if rank.number == 1:
            raise OSError("the disk is gone")
        return cut_pair(pair, network, rank)

    with engine_of(base("llama"), 2, enable_lora=True, max_loras=1) as engine:
        engine.set_adapter("x", str(adapter("llama", "all")))
        with monkeypatch.context() as patch:
            patch.setattr("infer.engine.adapters.cut_pair", fail)
            with pytest.raises(CheckpointError, match="rank 1: the disk is gone"):
                engine.set_adapter("x", str(adapter("llama", "few")), replaces=True)
        assert serve(engine, [("x", 0)])["x", 0] == expected("llama", "all")[0]


def test_embedding_and_head_of_ranks_are_adapted(tmp_path: Path) -> None:
    make_checkpoint("llama", path := tmp_path / "base", sizes=SIZES, seed=1, tie_embeddings=False)
    outer = make_adapter(tmp_path / "outer", path, **OUTER)
    asked = [(name, number) for number in range(len(PROMPTS)) for name in ("", "outer")]
    wanted = serve(make_engine(path, lora_modules={"outer": outer}), asked)
    with engine_of(path, 2, lora_modules={"outer": outer}) as engine:
        assert serve(engine, asked) == wanted
    tensors, own = _stored(outer / "adapter_model.safetensors"), read_weights(path)["lm_head.weight"]
    own[-1] += 1e-3  # a row of rank 1
    whole = {"base_model.model.lm_head.base_layer.weight": own}
    write_safetensors(outer / "adapter_model.safetensors", tensors | whole)
    with pytest.raises(CheckpointError, match="rank 1: .* which is not the model's own"):
        engine_of(path, 2, lora_modules={"outer": outer}).__enter__()


def test_the_plan_counts_the_part_of_a_rank() -> None:
    found = []
    for size in (1, 2):
        config = EngineConfig.from_knobs(
            model=str(base("llama")), device="cpu", tensor_parallel_size=size, enable_lora=True
        )
        headers = find_headers(config.load.model, revision=None, show_progress=False, model_impl="auto")
        found.append(plan_memory(config, headers, find_machine("cpu", None, None)).needs.adapters)
    assert found[1] < found[0] < 2 * found[1]  # of each pair one matrix is cut, and the other whole

"""The nodes that the ranks of a replica are placed on, by what the nodes of a cluster have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from infer.cluster import placing
from infer.cluster.placing import ReplicaActor, spread
from infer.cluster.serve import bundle_of
from infer.config.settings import EngineConfig


def place(*sizes: dict[str, float], **knobs: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    config = EngineConfig.from_knobs(**knobs)
    orders = {"models": {"m": config.knobs()}, "log_level": "info"}
    made, bundles = spread(orders, bundle_of({"m": config}), sizes)
    return bundles, made["models"]["m"]


def cpu(number: float) -> dict[str, float]:
    return {"CPU": number, "memory": 1e9}


def test_a_replica_has_a_gpu_for_each_rank_and_a_cpu_for_each_thread() -> None:
    for knobs, bundle in (
        ({}, {"CPU": 1.0, "GPU": 1.0}),
        ({"device": "cpu", "num_threads": 4}, {"CPU": 4.0}),
        ({"tensor_parallel_size": 4}, {"CPU": 4.0, "GPU": 4.0}),
        ({"tensor_parallel_size": 4, "device": "cuda:0"}, {"CPU": 4.0, "GPU": 1.0}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "device": "cpu"}, {"CPU": 4.0}),
        ({"tensor_parallel_size": 2, "device": "cpu", "num_threads": 8}, {"CPU": 8.0}),
        ({"tensor_parallel_size": 4, "device": "cpu", "nnodes": 2}, {"CPU": 2.0}),
    ):
        assert bundle_of({"m": EngineConfig.from_knobs(**knobs)}) == bundle, knobs


@pytest.mark.parametrize(
    ("sizes", "nnodes"),
    [
        ((4.0,), 1),
        ((2.0, 4.0), 1),
        ((2.0, 2.0), 2),
        ((2.0, 3.0, 1.0), 2),
        ((1.0,) * 5, 4),
        ((3.0, 1.0), 1),
        ((), 1),
    ],
)
def test_ranks_are_on_as_few_nodes_as_are_large_enough(sizes: tuple[float, ...], nnodes: int) -> None:
    bundles, knobs = place(*map(cpu, sizes), tensor_parallel_size=4, device="cpu", num_threads=4)
    each = 4.0 / nnodes
    assert bundles == [{"CPU": each}] * nnodes
    assert knobs["nnodes"] == nnodes and knobs["num_threads"] == each


def test_gpus_are_on_as_few_nodes_and_a_number_that_was_given_is_kept() -> None:
    large, small = {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 1.0}
    assert place(small, large, tensor_parallel_size=4)[0] == [{"CPU": 4.0, "GPU": 4.0}]
    assert place(small, small, tensor_parallel_size=2)[0] == [{"CPU": 1.0, "GPU": 1.0}] * 2
    shared = place(small, tensor_parallel_size=2, device="cuda:0")[0]
    assert shared == [{"CPU": 2.0, "GPU": 1.0}], "ranks that share a GPU are on one node"
    bundles, knobs = place(cpu(64), tensor_parallel_size=2, nnodes=2, device="cpu")
    assert bundles == [{"CPU": 1.0}] * 2 and knobs["nnodes"] == 2


@pytest.mark.parametrize("nnodes", [1, 2])
def test_only_a_replica_on_several_nodes_gets_an_address_for_ranks(
    nnodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node the address has no effect, and the start line would say so of knobs that nobody set."""
    started: list[Any] = []
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.2"))
    monkeypatch.setattr(placing, "import_ray", lambda: ray)
    monkeypatch.setattr(placing, "ReplicaProcess", started.append)
    config = EngineConfig.from_knobs(tensor_parallel_size=2, nnodes=nnodes)
    actor = ReplicaActor({"models": {"m": config.knobs()}, "server": {}})
    knobs = started[0]["models"]["m"]
    if nnodes == 1:
        assert knobs == config.knobs()
    else:
        assert knobs == config.knobs() | actor.address()
        assert knobs["master_addr"] == "127.0.0.2"

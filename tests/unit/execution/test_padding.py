"""Steps of padding, which a server runs before it is ready: all sizes, with few layers, changing nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout
from infer.cache.paged_pool import PagedKVCachePool
from infer.execution.gpu.runner import DeviceRunner
from tests.support.kv_store import fill_store
from tests.support.running import Running
from tests.support.tiny import tiny_model

MAX_ROWS, MAX_TOKENS = 20, 2048


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceRunner]:
    """A runner on the CPU that prepares as one on a GPU does, but compiles nothing."""
    model = tiny_model("qwen3").model
    config, layers = model.config, model.layers
    first, last = layers
    model.layers = nn.ModuleList([first, first, first, first, last])
    store = KVStore(
        layout=KVLayout.whole(config.num_layers), num_blocks=4, block_size=4,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    fill_store(store, 1.0)
    made = DeviceRunner(
        model, store, Running(PagedKVCachePool(4, 4)).state, max_batch_size=MAX_ROWS, max_tokens=MAX_TOKENS,
        max_seq_len=60, use_cuda_graphs=True,
    )  # fmt: skip
    monkeypatch.setattr(made, "_pads", True)
    monkeypatch.setattr(made, "compile", lambda: None)
    yield made
    model.layers = layers  # of a model that other tests share


def test_a_server_runs_steps_of_all_sizes_before_it_is_ready(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = runner._model, runner._store
    tried: set[tuple[int, int]] = set()
    outputs: set[int] = set()
    num_layers: set[int] = set()
    forward, logits = runner._forward, model.logits

    def watch_forward(num_tokens: int, rows_S: torch.Tensor, *rest: object) -> torch.Tensor:
        tried.add((num_tokens, len(rows_S)))
        num_layers.add(len(model.layers))
        return forward(num_tokens, rows_S, *rest)  # type: ignore[arg-type]

    def watch_logits(hidden_SD: torch.Tensor) -> torch.Tensor:
        outputs.add(len(hidden_SD))
        return logits(hidden_SD)

    monkeypatch.setattr(runner, "_forward", watch_forward)
    monkeypatch.setattr(model, "logits", watch_logits)
    with caplog.at_level(logging.ERROR):
        while runner.prepare():
            pass
    assert not caplog.records, "a step of padding could not be run"
    assert num_layers == {2} and len(model.layers) == 5
    assert {tokens for tokens, _ in tried} == {512, 768, 1032, 1288, 1536, 1792, 2048}
    assert {rows for _, rows in tried} == {0, MAX_ROWS}
    assert outputs == set(range(1, 18))
    assert all(bool((keys == 1.0).all()) for keys in store.keys), "padding is written nowhere"


class Pieces:
    """In place of graphs or plans: three of them, each of which notes its thread and waits for the other."""

    def __init__(
        self, mine: threading.Event, others: threading.Event, error: Exception | None = None
    ) -> None:
        self._mine, self._others, self._error = mine, others, error
        self.threads: list[int] = []

    def prepare(self) -> bool:
        self.threads.append(threading.get_ident())
        self._mine.set()
        assert self._others.wait(10), "one waits for all of the other"
        if self._error is not None:
            raise self._error
        return len(self.threads) < 3


def test_steps_are_captured_beside_plans_which_belong_to_this_thread(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = threading.Event(), threading.Event()
    graphs, plans = Pieces(first, second), Pieces(second, first)
    monkeypatch.setattr(runner, "_graphs", graphs)
    monkeypatch.setattr(runner, "_dense", plans)
    runner._capture_beside_plans()
    assert plans.threads == [threading.get_ident()] * 3
    assert len(graphs.threads) == 3 and threading.get_ident() not in graphs.threads


def test_a_capture_that_fails_is_not_lost_in_its_thread(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = threading.Event(), threading.Event()
    monkeypatch.setattr(runner, "_graphs", Pieces(first, second, RuntimeError("device lost")))
    monkeypatch.setattr(runner, "_dense", Pieces(second, first))
    with pytest.raises(RuntimeError, match="device lost"):
        runner._capture_beside_plans()


def test_the_largest_step_is_rehearsed_with_few_layers(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    forward = runner._forward

    def watch(num_tokens: int, *rest: object) -> torch.Tensor:
        seen.append((num_tokens, len(runner._model.layers)))
        return forward(num_tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "_forward", watch)
    runner.compute_padding()
    assert seen == [(MAX_TOKENS, 2)] and len(runner._model.layers) == 5

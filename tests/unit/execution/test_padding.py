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
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.gpu.warm_up import WarmUp
from infer.models.model import Model
from tests.support.kv_store import fill_store
from tests.support.running import Running
from tests.support.tiny import tiny_model

MAX_ROWS, MAX_TOKENS = 20, 2048


@pytest.fixture
def warm_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[WarmUp]:
    """Prepares a device half on the CPU as one on a GPU is prepared, but compiles nothing."""
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
    launcher = StepLauncher(
        model, store, Running(PagedKVCachePool(4, 4)).shape, max_batch_size=MAX_ROWS, max_tokens=MAX_TOKENS,
        max_seq_len=60, use_cuda_graphs=True,
    )  # fmt: skip
    device = GpuDevice(launcher)
    made = WarmUp(device)
    monkeypatch.setattr(made, "_pads", True)
    monkeypatch.setattr(made, "compile", lambda: None)
    monkeypatch.setattr(device, "rare_orders", lambda: ())  # they run on the whole model
    yield made
    model.layers = layers  # of a model that other tests share


def test_a_server_runs_steps_of_all_sizes_before_it_is_ready(
    warm_up: WarmUp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = warm_up.launcher
    model, store = launcher.model, launcher.store
    tried: set[tuple[int, int]] = set()
    outputs: set[int] = set()
    num_layers: set[int] = set()
    forward, logits = launcher.forward, model.logits

    def watch_forward(view: Model, num_tokens: int, rows_S: torch.Tensor, *rest: object) -> torch.Tensor:
        tried.add((num_tokens, len(rows_S)))
        num_layers.add(len(view.layers))
        return forward(view, num_tokens, rows_S, *rest)  # type: ignore[arg-type]

    def watch_logits(hidden_SD: torch.Tensor) -> torch.Tensor:
        outputs.add(len(hidden_SD))
        return logits(hidden_SD)

    monkeypatch.setattr(launcher, "forward", watch_forward)
    monkeypatch.setattr(model, "logits", watch_logits)
    with caplog.at_level(logging.ERROR):
        while warm_up.prepare():
            pass
    assert not caplog.records, "a step of padding could not be run"
    assert isinstance(model, Model) and num_layers == {2} and len(model.layers) == 5
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


def test_steps_are_captured_during_plans_which_belong_to_this_thread(
    warm_up: WarmUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = threading.Event(), threading.Event()
    graphs, plans = Pieces(first, second), Pieces(second, first)
    monkeypatch.setattr(warm_up.launcher, "graphs", graphs)
    monkeypatch.setattr(warm_up.launcher.attention, "dense", plans)
    warm_up._capture_during_plans()
    assert plans.threads == [threading.get_ident()] * 3
    assert len(graphs.threads) == 3 and threading.get_ident() not in graphs.threads


def test_a_capture_that_fails_is_not_lost_in_its_thread(
    warm_up: WarmUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = threading.Event(), threading.Event()
    monkeypatch.setattr(warm_up.launcher, "graphs", Pieces(first, second, RuntimeError("device lost")))
    monkeypatch.setattr(warm_up.launcher.attention, "dense", Pieces(second, first))
    with pytest.raises(RuntimeError, match="device lost"):
        warm_up._capture_during_plans()


def test_the_largest_step_is_rehearsed_with_few_layers(
    warm_up: WarmUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    launcher = warm_up.launcher
    forward = launcher.forward

    def watch(view: Model, num_tokens: int, *rest: object) -> torch.Tensor:
        seen.append((num_tokens, len(view.layers)))
        return forward(view, num_tokens, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(launcher, "forward", watch)
    warm_up.compute_padding()
    assert isinstance(launcher.model, Model)
    assert seen == [(MAX_TOKENS, 2)] and len(launcher.model.layers) == 5


def test_a_rank_runs_padding_through_what_is_not_captured(
    warm_up: WarmUp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher, store, ran = warm_up.launcher, warm_up.launcher.store, list[str]()

    def watch(owner: object, name: str) -> None:
        run = getattr(owner, name)

        def note(*args: object) -> object:
            ran.append(name)
            return run(*args)

        monkeypatch.setattr(owner, name, note)

    watch(launcher.rows, "send_padding")
    watch(launcher, "forward")
    watch(launcher, "sample_rows")
    with caplog.at_level(logging.WARNING):
        warm_up.load()
    assert ran == ["send_padding", "forward", "sample_rows"] and not caplog.records
    assert all(bool((keys == 1.0).all()) for keys in store.keys), "padding is written nowhere"

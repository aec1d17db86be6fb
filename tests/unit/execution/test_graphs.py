"""Which steps are captured, and what becomes of those that cannot be; nothing is recorded without a GPU."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import pytest
import torch

from infer.config.profiles.cpu import CPU
from infer.execution.gpu.graphs import (
    CapturedStep,
    StepGraphs,
    StepSize,
    captured_tokens,
    most_tokens,
    short_step,
)
from infer.models.config import ExpertConfig, ModelConfig

SIZE = StepSize(4, 0)
LOGITS = torch.zeros(4, 5)
OWN_LOGITS = torch.ones(1)  # of a step that is launched kernel by kernel


class Follower:
    """In place of the graph in which a head follows a step."""

    num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Recorder:
    """In place of `StepGraphs._record`: fails for want of memory as often as told."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.num_replays = 0
        self.follower: Follower | None = None  # None: no head follows

    def record(self, size: StepSize) -> CapturedStep:
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        graph = cast(torch.cuda.CUDAGraph, self)
        return CapturedStep(graph, graph, cast("torch.cuda.CUDAGraph | None", self.follower), LOGITS)

    def replay(self) -> None:
        self.num_replays += 1


class Steps:
    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        num_failures: int = 0,
        max_rows: int = 4,
        max_tokens: int = 0,
        short_step: int = 0,
    ) -> None:
        self.launched: list[StepSize] = []
        self.emptied = 0
        self.recorder = Recorder(num_failures)
        self.sampled: list[StepSize] = []
        self.graphs = StepGraphs(
            self._forward, self._sample, lambda: None, max_rows=max_rows, max_tokens=max_tokens,
            short_step=short_step, captures=True, profile=CPU.graphs,
        )  # fmt: skip
        monkeypatch.setattr(self.graphs, "_record", self.recorder.record)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _forward(self, size: StepSize) -> torch.Tensor:
        self.launched.append(size)
        return OWN_LOGITS

    def _sample(self, size: StepSize, logits_SV: torch.Tensor) -> None:
        assert logits_SV is OWN_LOGITS
        self.sampled.append(size)

    def run(self, size: StepSize) -> torch.Tensor:
        self.graphs.forward(size)
        return self.graphs.sample(size)

    def _empty(self, *_: Any) -> None:
        self.emptied += 1


def test_memory_kept_for_later_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    assert steps.graphs.ensure(SIZE) and not steps.graphs.ensure(SIZE)
    assert steps.run(SIZE) is LOGITS and steps.graphs.is_replaying
    assert (steps.emptied, steps.recorder.num_replays, steps.launched) == (0, 2, [SIZE])


def test_a_capture_without_room_is_tried_again_with_all_that_can_be_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, num_failures=1)
    assert steps.graphs.ensure(SIZE)
    steps.run(SIZE)
    assert (steps.emptied, steps.recorder.num_replays) == (1, 2)


def test_a_step_that_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, num_failures=2)
    assert steps.graphs.ensure(SIZE) and not steps.graphs.ensure(SIZE)
    steps.run(SIZE)
    assert not steps.graphs.is_replaying
    assert (steps.recorder.num_replays, steps.launched, steps.sampled) == (0, [SIZE] * 2, [SIZE] * 2)


def test_a_captured_step_is_followed_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    follower = steps.recorder.follower = Follower()
    steps.graphs.ensure(SIZE)
    steps.run(SIZE)
    assert follower.num_replays == 0
    steps.graphs.follow(SIZE)
    assert (follower.num_replays, steps.recorder.num_replays, steps.launched) == (1, 2, [SIZE])


class FakeGraph:
    """In place of `torch.cuda.CUDAGraph`: a pool ends with the last graph in it, as PyTorch's do."""

    pools: ClassVar[dict[object, int]] = {}

    def capture_begin(self, pool: object, **_: Any) -> None:
        assert self.pools.setdefault(pool, 1) > 0, "this pool has ended"
        self.pool = pool

    def capture_end(self) -> None:
        self.pools[self.pool] = 0
        raise RuntimeError("operation failed due to a previous error during capture")


def fake_capture(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    """Put a class in place of `torch.cuda.CUDAGraph`, and nothing in place of streams."""
    fakes = {"synchronize": lambda: None, "graph_pool_handle": object, "CUDAGraph": graph}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr("infer.execution.gpu.graphs._stream_of", lambda device: None)


@pytest.mark.parametrize("has_head", [True, False])
def test_forward_sampler_and_head_are_recorded_in_a_graph_each(
    has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = list["WholeGraph"]()

    class WholeGraph:
        """In place of `torch.cuda.CUDAGraph`: knows what was launched while it was recorded."""

        def __init__(self) -> None:
            self.launched, self.is_whole = list[str](), False
            graphs.append(self)

        def capture_begin(self, *_: Any, **__: Any) -> None:
            assert all(graph.is_whole for graph in graphs[:-1])

        def capture_end(self) -> None:
            self.is_whole = True

    def forward(size: StepSize) -> torch.Tensor:
        graphs[-1].launched.append("forward")
        return LOGITS

    fake_capture(monkeypatch, WholeGraph)
    monkeypatch.setattr("infer.execution.gpu.graphs.borrow", lambda x: x)
    steps = StepGraphs(
        forward, lambda *_: graphs[-1].launched.append("sampler"), lambda: None, max_rows=4, max_tokens=0,
        captures=True, profile=CPU.graphs,
        follow=(lambda _: graphs[-1].launched.append("head")) if has_head else None,
    )  # fmt: skip
    captured = steps._record(SIZE)
    made: list[Any] = [captured.forward, captured.sampler, captured.follower]
    assert made == [*graphs, None][:3]
    assert [graph.launched for graph in graphs] == [["forward"], ["sampler"], ["head"]][: 2 + has_head]
    assert all(graph.is_whole for graph in graphs)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Graphs whose captures find no memory."""

    def launch(size: StepSize) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fake_capture(monkeypatch, FakeGraph)
    return StepGraphs(
        launch, lambda *_: None, lambda: None, max_rows=4, max_tokens=0, captures=True, profile=CPU.graphs
    )


def test_why_a_capture_failed_is_not_hidden_by_its_end(failing: StepGraphs) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        failing._record(SIZE)


def test_after_a_first_capture_that_failed_the_next_one_has_a_pool_that_lives(failing: StepGraphs) -> None:
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            failing._record(SIZE)


def test_every_size_is_captured_once_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    while steps.graphs.prepare():
        pass
    assert steps.launched == [StepSize(4, 0), StepSize(2, 0), StepSize(1, 0)]


def model_of(
    hidden_size: int, mlp_size: int, heads: tuple[int, int, int], experts: ExpertConfig | None = None
) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    return ModelConfig(
        family="llama", vocab_size=1000, hidden_size=hidden_size, intermediate_size=mlp_size, num_layers=4,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, context_len=8192, norm_eps=1e-6,
        activation="silu", tie_embeddings=True, experts=experts,
    )  # fmt: skip


SMALL = model_of(1024, 3072, (16, 8, 128))  # 0.6B: 16 million weights per layer


@pytest.mark.parametrize(
    ("config", "max_tokens", "most"),
    [
        (SMALL, 8192, 4096),
        (model_of(2048, 8192, (32, 8, 64)), 8192, 1536),  # 1B: 61 million
        (model_of(4096, 14336, (32, 8, 128)), 8192, 512),  # 8B: computed more slowly than launched
        (SMALL, 2048, 1024),  # half of the largest step
        (SMALL, 512, 512),
    ],
)
def test_prompts_are_captured_while_launching_takes_longer_than_computing(
    config: ModelConfig, max_tokens: int, most: int
) -> None:
    assert most_tokens(config, max_tokens, CPU.graphs) == most


def test_of_experts_those_count_that_a_token_is_sent_to() -> None:
    experts = ExpertConfig(num_experts=128, num_choices=8, size=768, normalized=True)
    sparse = model_of(2048, 6144, (32, 4, 128), experts)  # 57 million of 620 million weights per layer
    assert most_tokens(sparse, 8192, CPU.graphs) == 1536
    half_dense = dataclasses.replace(experts, dense_layers=(0, 1))  # 6144 = 8 * 768: as much for a token
    assert most_tokens(dataclasses.replace(sparse, experts=half_dense), 8192, CPU.graphs) == 1536


def test_many_tokens_of_prompts_have_sizes_once_they_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = Steps(monkeypatch, max_tokens=1024).graphs
    assert graphs.size_for(0, 600) is None  # not captured yet: launched kernel by kernel
    assert graphs.size_for(3, 600) is None
    while graphs.prepare():
        pass
    assert graphs.size_for(0, 600) == StepSize(0, 640)
    assert graphs.size_for(0, 1024) == StepSize(0, 1024)
    assert graphs.size_for(0, 1025) is None and graphs.size_for(3, 1025) is None
    most_rows = graphs.decode_rows[-1]
    assert graphs.size_for(3, 600) == StepSize(min(16, most_rows), 768)
    assert graphs.size_for(most_rows, 1000) == StepSize(most_rows, 1024)
    assert graphs.size_for(3, 500) == StepSize(4, 512)


@pytest.mark.parametrize(
    ("rows", "tokens", "size"),
    [(32, 32, (32, 32)), (20, 30, (32, 32)), (32, 33, (32, 64)), (5, 1, (16, 32)), (0, 7, (0, 32))],
)
def test_few_prompt_tokens_beside_rows_are_hardly_padded(
    monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, size: tuple[int, int]
) -> None:
    """A step of 64 tokens decodes through kernels that a step of 96 may not use."""
    graphs = Steps(monkeypatch, max_rows=256, max_tokens=512).graphs
    assert graphs.size_for(rows, tokens) == StepSize(*size)


LARGE = model_of(4096, 14336, (32, 8, 128))


@pytest.mark.parametrize(
    ("config", "max_tokens", "num_tokens", "short", "most"),
    [
        (LARGE, 16384, 1024, 1024, 992),
        (LARGE, 8192, 1024, 0, 512),  # a small GPU
        (LARGE, 16384, 0, 0, 512),  # prompts never hurry, or as the operator says
        (SMALL, 16384, 4096, 0, 4096),  # other sizes do
    ],
)
def test_short_steps_have_sizes_of_their_own_where_no_others_do(
    config: ModelConfig, max_tokens: int, num_tokens: int, short: int, most: int
) -> None:
    assert short_step(config, max_tokens, num_tokens, CPU.graphs) == short
    assert captured_tokens(config, max_tokens, num_tokens, CPU.graphs) == most


@pytest.mark.parametrize(
    ("rows", "tokens", "size"),
    [
        (170, 832, (192, 832)),
        (192, 832, (192, 832)),
        (161, 705, (192, 832)),  # as much padding as there may be
        (161, 704, None),
        (192, 833, None),
        (1, 992, (32, 992)),
        (0, 1024, None),  # no row waits for it
        (256, 768, (256, 768)),
        (257, 736, None),  # more rows than there can be
        (170, 512, (256, 512)),
    ],
)
def test_a_short_step_is_hardly_padded(
    monkeypatch: pytest.MonkeyPatch, rows: int, tokens: int, size: tuple[int, int] | None
) -> None:
    graphs = Steps(monkeypatch, max_rows=256, max_tokens=512, short_step=1024).graphs
    while graphs.prepare():
        pass
    assert graphs.size_for(rows, tokens) == (StepSize(*size) if size else None)
    assert max(map(sum, graphs.sizes)) == 1024


def test_a_short_step_has_prompt_tokens_however_many_rows_there_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = Steps(monkeypatch, max_rows=2048, max_tokens=512, short_step=1024).graphs.sizes
    assert StepSize(992, 32) in sizes
    assert all(size.num_tokens >= 0 for size in sizes)


def test_without_graphs_of_prompts_a_long_one_has_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Steps(monkeypatch, max_tokens=512).graphs.size_for(0, 600) is None
    assert Steps(monkeypatch, max_tokens=0).graphs.size_for(0, 6) is None


def test_the_pool_begins_as_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = StepGraphs(
        lambda _: LOGITS,
        lambda *_: None,
        lambda: None,
        max_rows=4,
        max_tokens=0,
        captures=True,
        pool_bytes=5000,
        profile=CPU.graphs,
    )
    taken: list[int] = []

    def empty(num_bytes: int, **_: Any) -> None:
        taken.append(num_bytes)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError):
        graphs._take_block()
    graphs._take_block()  # there is no room for it: tried once
    assert taken == [5000]


def test_ranks_use_the_graphs_that_all_of_them_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails on one rank: the others must not cut the step in another way."""
    ranks = [Steps(monkeypatch, max_tokens=2048) for _ in range(2)]
    sizes = ranks[0].graphs.sizes
    large = max((size for size in sizes if not size.num_rows), key=lambda size: size.num_tokens)
    for number, steps in enumerate(ranks):
        steps.graphs.is_agreed = False
        for size in sizes:
            if (number, size) != (1, large):
                steps.graphs.ensure(size)
    ranks[1].graphs._uncaptured.add(large)
    assert [steps.graphs.size_for(0, large.num_tokens) for steps in ranks] == [
        None,
        None,
    ]  # before they have agreed
    found = [bytes(size in steps.graphs._graphs for size in sizes) for steps in ranks]
    for steps in ranks:
        steps.graphs.agree(lambda mine: [each.ljust(len(mine) + 5, b"\0") for each in found])
        assert not steps.graphs.is_captured(large) and not steps.graphs.ensure(large)
        assert steps.graphs.size_for(0, large.num_tokens) is None
        assert all(steps.graphs.is_captured(size) for size in sizes if size != large)

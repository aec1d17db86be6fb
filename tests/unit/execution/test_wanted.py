"""Which tokens a step is run for: the last layer's rows are those that sample, in every device half."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.cache.layout import KVLayout
from infer.cache.paged_pool import PagedKVCachePool
from infer.config.profiles.cpu import CPU
from infer.execution.device import StepResult
from infer.execution.gpu.device import GpuDevice
from infer.execution.gpu.launcher import StepLauncher
from infer.execution.layout import needed_tokens
from infer.execution.order import READS_PROMPTS, StepOrder
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library
from infer.sampling.params import SamplingParams
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.kv_store import fill_store
from tests.support.running import Running
from tests.support.simple_loop import all_logprobs, generate_greedy
from tests.support.tiny import is_close, tiny_model

MAX_ROWS = 4
PROMPTS = {1: [5, 6, 7, 8, 9], 2: [(place * 37) % 200 for place in range(50)], 3: list(range(100, 120))}
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def make_seq(seq_id: int, params: SamplingParams = GREEDY, pooling: str | None = None) -> Sequence:
    request = Request(request_id=str(seq_id), prompt=tuple(PROMPTS[seq_id]), params=params, pooling=pooling)
    return Sequence(seq_id, SequenceGroup(request, max_total=99, stop_ids=(), seed=0), 0, PROMPTS[seq_id][:])


def order_of(chunks: list[Chunk], sequences: list[Sequence]) -> StepOrder:
    """The order of these chunks, each of another sequence."""
    running = Running(PagedKVCachePool(60, 4))
    for seq in sequences:
        seq.tokens.append(7)  # one that was drawn
        running.enter(seq, len(seq.tokens))
    return running.order(*chunks)


@pytest.mark.parametrize(
    ("chunks", "last_places", "places", "last_rows"),
    [
        ([Chunk(1, 5, 6, 1), Chunk(2, 50, 51, 1)], [0, 1], None, [0, 1]),  # all decode
        ([Chunk(2, 0, 50, 1)], [49], [49], [0]),
        ([Chunk(2, 0, 50, 3)], [49], [49], [0]),  # about to fork: one row, three samples
        ([Chunk(1, 5, 6, 1), Chunk(2, 0, 9, 0), Chunk(3, 0, 20, 1)], [0, 9, 29], [0, 29], [0, None, 1]),
        ([Chunk(2, 0, 9, 0), Chunk(1, 5, 6, 1)], [9, 0], [0], [None, 0]),  # those that decode stand first
        ([Chunk(2, 0, 9, 0), Chunk(3, 0, 5, 0)], [8, 13], [8], [None, None]),  # none samples
        ([Chunk(2, 3, 4, 0)], [0], [0], [None]),
    ],
)
def test_those_that_sample_are_needed(
    chunks: list[Chunk], last_places: list[int], places: list[int] | None, last_rows: list[int | None]
) -> None:
    sequences = [make_seq(chunk.seq_id) for chunk in chunks]
    found = needed_tokens(order_of(chunks, sequences), last_places)
    assert found.places == places
    read = [row if chunk.num_samples else None for chunk, row in zip(chunks, found.last_rows, strict=True)]
    assert read == last_rows


def test_all_tokens_are_needed_for_logprobs_of_a_prompt() -> None:
    asking = SamplingParams(prompt_logprobs=1)
    order = order_of([Chunk(1, 0, 5, 1), Chunk(2, 0, 9, 0)], [make_seq(1), make_seq(2, asking)])
    assert order.flags & READS_PROMPTS
    assert needed_tokens(order, [4, 13]) == (None, [4, 13])
    chunks = [Chunk(3, 0, 20, 1), Chunk(2, 49, 50, 1)]  # its last token predicts the output
    order = order_of(chunks, [make_seq(3), make_seq(2, asking)])
    assert not order.flags & READS_PROMPTS
    assert needed_tokens(order, [19, 20]) == ([19, 20], [0, 1])


class Harness:
    """A device half over a tiny model whose last layer is watched."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model = tiny_model("qwen3").model
        config, cpu = model.config, torch.device("cpu")
        self.running = Running(PagedKVCachePool(40, 4))
        store = KVStore(
            layout=KVLayout.whole(config.num_layers),
            num_blocks=40, block_size=4, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, dtype=torch.float32, device=cpu,
        )  # fmt: skip
        fill_store(store, float("nan"))
        self.device: TorchDevice | GpuDevice
        if kind in ("sized", "ragged"):
            launcher = StepLauncher(
                model, store, self.running.shape, max_batch_size=MAX_ROWS, max_tokens=256, max_seq_len=60,
                use_cuda_graphs=kind == "sized",
            )  # fmt: skip
            self.device = GpuDevice(launcher)
        else:
            self.device = TorchDevice(
                model, store, self.running.shape, max_batch_size=MAX_ROWS, attention_backend=kind
            )
        last: Any = model.layers[-1]
        self.rows: list[int] = []  # that the last MLP has seen, step by step
        self.read: list[int] = []  # of which logits were made
        multiply, logits = last.mlp.down.forward, model.logits

        def watch(x_SF: torch.Tensor) -> Any:
            self.rows.append(len(x_SF))
            return multiply(x_SF)

        def read(hidden_SD: torch.Tensor) -> torch.Tensor:
            self.read.append(len(hidden_SD))
            return logits(hidden_SD)

        monkeypatch.setattr(last.mlp.down, "forward", watch)
        monkeypatch.setattr(model, "logits", read)
        self.seqs: dict[int, Sequence] = {}

    def add(self, seq_id: int, params: SamplingParams = GREEDY) -> None:
        self.seqs[seq_id] = make_seq(seq_id, params)
        self.running.enter(self.seqs[seq_id], len(PROMPTS[seq_id]) + 1)

    def run(self, *chunks: Chunk) -> StepResult:
        result = self.device.run(self.running.order(*chunks)).wait()
        for chunk, ids in zip(chunks, result.ids, strict=True):
            self.seqs[chunk.seq_id].tokens.extend(ids[:1])
            self.seqs[chunk.seq_id].num_tokens += len(ids[:1])
        return result


all_halves = pytest.mark.parametrize("kind", ["c" if library() else "sdpa", "torch_ref", "ragged", "sized"])


@all_halves
def test_the_last_mlp_sees_the_rows_that_sample(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(kind, monkeypatch)
    for seq_id in PROMPTS:
        harness.add(seq_id)
    harness.run(Chunk(1, 0, 5, 1))
    harness.run(Chunk(1, 5, 6, 1), Chunk(3, 0, 8, 0), Chunk(2, 0, 50, 1))
    harness.run(Chunk(3, 8, 17, 0))
    harness.run(Chunk(3, 17, 20, 1))
    if kind == "sized":  # room for every prompt that a graph may hold
        room = CPU.graphs.max_chunks
        assert harness.rows[:3] == [room, MAX_ROWS + room, room]
        assert harness.read == harness.rows
    else:
        assert harness.rows[:3] == [1, 2, 1]
        assert harness.read == [1, 2, 1], "of the third step, which samples nothing, none"
    monkeypatch.undo()
    for seq_id, num_tokens in ((1, 2), (2, 1), (3, 1)):
        made = list(harness.seqs[seq_id].tokens)[len(PROMPTS[seq_id]) :]
        assert made == generate_greedy(harness.model, PROMPTS[seq_id], num_tokens)


@all_halves
def test_a_batch_that_decodes_is_not_gathered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(kind, monkeypatch)
    forward, places = harness.model.forward, list[Any]()

    def note(tokens_T: torch.Tensor, step: Any) -> torch.Tensor:
        places.append(step.logit_indices)
        return forward(tokens_T, step)

    monkeypatch.setattr(harness.model, "forward", note)
    for seq_id in (1, 3):
        harness.add(seq_id)
    harness.run(Chunk(1, 0, 5, 1), Chunk(3, 0, 20, 1))
    harness.run(Chunk(1, 5, 6, 1), Chunk(3, 20, 21, 1))
    assert places[0] is not None
    assert places[1:] in ([], [None]), "no places, or a recorded program in place of the model"
    assert harness.read[1] == (2 if kind != "sized" else harness.rows[1])


@all_halves
def test_logprobs_of_a_prompt_are_of_all_its_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(kind, monkeypatch)
    harness.add(1)
    harness.add(2, SamplingParams(temperature=0.0, prompt_logprobs=1))
    result = harness.run(Chunk(1, 0, 5, 1), Chunk(2, 0, 50, 1))
    found = result.prompt_logprobs[1]
    assert harness.rows == [55]
    monkeypatch.undo()
    assert [list(ids) for ids in result.ids] == [
        generate_greedy(harness.model, PROMPTS[seq_id], 1) for seq_id in (1, 2)
    ]
    expected = all_logprobs(harness.model, PROMPTS[2])
    assert [row.token_id for row in found] == PROMPTS[2][1:]
    assert all(is_close(row.logprob, expected[place, row.token_id]) for place, row in enumerate(found))


@all_halves
def test_a_chunk_about_to_fork_has_one_row_for_all_its_samples(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(kind, monkeypatch)
    harness.add(1)
    harness.add(2, SamplingParams(n=3, seed=5, logprobs=0))
    result = harness.run(Chunk(1, 0, 4, 0), Chunk(2, 0, 50, 3))
    assert (harness.rows, harness.read) == ([1], [3])
    monkeypatch.undo()
    expected = all_logprobs(harness.model, PROMPTS[2])[-1]
    assert len(set(result.ids[1])) > 1, "each with a seed of its own"
    for token_id, row in zip(result.ids[1], result.logprobs[1], strict=True):
        assert row is not None and is_close(row.logprob, expected[token_id])


def test_all_tokens_are_needed_for_an_embedding() -> None:
    asking = make_seq(2, pooling="mean")
    order = order_of([Chunk(1, 0, 5, 1), Chunk(2, 0, 9, 0)], [make_seq(1), asking])
    assert needed_tokens(order, [4, 13]) == (None, [4, 13])

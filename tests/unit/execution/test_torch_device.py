"""One order at a time through a real tiny model: logits, samples and logprobs of the right rows."""

from __future__ import annotations

import pytest
import torch

from infer.cache.kv_store import KVStore
from infer.cache.layout import COPY, SWAP_IN, SWAP_OUT, KVLayout, Transfer
from infer.cache.paged_pool import PagedKVCachePool
from infer.execution.host_sampling import LOGPROB_ROWS
from infer.execution.row_book import RowBook, RowEntry
from infer.execution.torch_device import TorchDevice
from infer.kernels.cpu.library import library
from infer.models.model import Model
from infer.sampling.params import SamplingParams, sequence_seed
from infer.scheduling.plan import Chunk, Chunks, StepPlan
from infer.scheduling.request import Request
from infer.scheduling.sequence import Sequence, SequenceGroup
from tests.support.kv_store import fill_store
from tests.support.running import Running
from tests.support.simple_loop import all_logprobs, generate_greedy
from tests.support.step import ListCache, ListStep
from tests.support.tiny import is_close, tiny_model


def make_device(num_host_blocks: int = 0) -> tuple[TorchDevice, Running, KVStore, Model]:
    model = tiny_model("qwen3").model
    config = model.config
    pool = PagedKVCachePool(40, 4, num_host_blocks=num_host_blocks)
    store = KVStore(
        layout=KVLayout.whole(config.num_layers),
        num_blocks=40,
        block_size=4,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_host_blocks=num_host_blocks,
    )
    fill_store(store, float("nan"))
    running = Running(pool)
    device = TorchDevice(
        model, store, running.shape, max_batch_size=4, attention_backend="c" if library() else "sdpa"
    )
    return device, running, store, model


def make_seq(
    seq_id: int, prompt: list[int], params: SamplingParams, seed: int = 0, pooling: str | None = None
) -> Sequence:
    request = Request(request_id=str(seq_id), prompt=tuple(prompt), params=params, pooling=pooling)
    return Sequence(seq_id, SequenceGroup(request, max_total=99, stop_ids=(7,), seed=seed), 0, list(prompt))


GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def test_an_order_runs_prompts_and_decodes_in_one_batch() -> None:
    device, running, _, model = make_device()
    prompts = {1: [5, 6, 7, 8, 9], 2: [20, 21, 22]}
    seqs = {seq_id: make_seq(seq_id, prompt, GREEDY) for seq_id, prompt in prompts.items()}
    for seq_id, prompt in prompts.items():
        running.enter(seqs[seq_id], len(prompt) + 1)
    first = device.run(running.order(Chunk(1, 0, 5, 1), step=1)).wait()
    seqs[1].tokens.extend(first.ids[0])
    second = device.run(running.order(Chunk(1, 5, 6, 1), Chunk(2, 0, 2, 0), step=2)).wait()
    third = device.run(running.order(Chunk(2, 2, 3, 1), step=3)).wait()
    assert second.ids[1] == (), "the prompt goes on: nothing is sampled"
    assert [*first.ids[0], *second.ids[0]] == generate_greedy(model, prompts[1], 2)
    assert list(third.ids[0]) == generate_greedy(model, prompts[2], 1)


def test_the_same_order_twice_gives_the_same_ids() -> None:
    device, running, _, _ = make_device()
    seq = make_seq(1, [5, 6, 7], SamplingParams(seed=3), seed=3)
    running.enter(seq, 3)
    order = running.order(Chunk(1, 0, 3, 4), step=1)
    once, again = device.run(order).wait(), device.run(order).wait()
    assert once.ids == again.ids
    assert len(once.ids[0]) == 4


def test_an_order_of_transfers_only_moves_blocks_and_runs_nothing() -> None:
    device, running, store, _ = make_device(num_host_blocks=2)
    fill_store(store, 0.0)
    block = store._parts[0][0][:, :, 3]
    block.fill_(1.5)
    moves = (Transfer(COPY, 3, 5), Transfer(SWAP_OUT, 5, 1), Transfer(SWAP_IN, 1, 8))
    result = device.run(running.host.order(StepPlan(1, Chunks.of(()), (), moves))).wait()
    assert (result.ids, result.logprobs, result.prompt_logprobs) == ([], [], {})
    assert torch.equal(store._parts[0][0][:, :, 8], block)
    assert torch.equal(store._parts[0][0][:, :, 5], block)
    assert not store._parts[0][0][:, :, 4].any()


@pytest.mark.parametrize("splits", [[], [1], [4], [3, 7, 70], [66]])
def test_prompt_logprobs_do_not_depend_on_the_chunks(splits: list[int]) -> None:
    device, running, _, model = make_device()
    prompt = [(place * 37) % 200 for place in range(55)]
    splits = [split for split in splits if split < 55]
    seq = make_seq(1, prompt, SamplingParams(prompt_logprobs=2, temperature=0.0))
    running.enter(seq, 55)
    found = []
    for start, stop in zip([0, *splits], [*splits, 55], strict=True):
        result = device.run(running.order(Chunk(1, start, stop, int(stop == 55)), step=1)).wait()
        found += result.prompt_logprobs.get(0, [])
    expected = all_logprobs(model, prompt)
    assert [row.token_id for row in found] == prompt[1:]
    assert all(is_close(row.logprob, expected[p, row.token_id]) for p, row in enumerate(found))


def test_prompt_logprobs_are_computed_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.execution.host_sampling.LOGPROB_ROWS", 8)
    assert LOGPROB_ROWS == 64
    device, running, _, model = make_device()
    sizes = []
    logits = model.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0])
        return logits(hidden)

    monkeypatch.setattr(model, "logits", spy)
    prompt = list(range(30))
    seq = make_seq(1, prompt, SamplingParams(prompt_logprobs=0, temperature=0.0))
    running.enter(seq, 30)
    result = device.run(running.order(Chunk(1, 0, 30, 1), step=1)).wait()
    assert sorted(sizes) == [1, 5, 8, 8, 8]
    assert len(result.prompt_logprobs[0]) == 29


def entry_of(params: SamplingParams) -> RowEntry:
    """What a device half notes about a sequence that begins."""
    _, running, _, _ = make_device()
    running.enter(make_seq(1, [1, 2], params, seed=9), 2)
    (entry,) = RowBook().enter(running.order(Chunk(1, 0, 2, 1)))
    return entry


def test_what_a_row_asks_of_the_sampler() -> None:
    entry = entry_of(SamplingParams(min_tokens=1))
    plain = entry.sample_row(2)
    assert (plain.seed, plain.position, plain.num_prompt) == (9, 2, 2)
    assert plain.num_logprobs is None
    assert plain.banned == (7,), "no stop before min_tokens"
    assert entry.sample_row(3).banned == ()
    assert entry.sample_row(2, index=3).seed == sequence_seed(9, 3)
    ranked = entry_of(SamplingParams(best_of=3)).sample_row(2)
    assert ranked.num_logprobs == 0, "ranking needs the logprob of the chosen token"
    asked = entry_of(SamplingParams(best_of=3, logprobs=2)).sample_row(2)
    assert asked.num_logprobs == 2


def test_the_sampler_has_the_parameters_of_the_request() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.25, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={3: 1.5, 200: -2.0},
    )  # fmt: skip
    row = entry_of(params).sample_row(2)
    assert row.params == params
    assert list(row.tokens) == [1, 2], "penalties count them"
    assert list(entry_of(SamplingParams()).sample_row(2).tokens) == []


def test_every_sequence_of_a_request_has_its_own_seed() -> None:
    assert sequence_seed(42, 0) == 42
    assert len({sequence_seed(seed, index) for seed in range(50) for index in range(20)}) == 1000


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_chunks_of_an_embedding_are_pooled_one_by_one(pooling: str) -> None:
    device, running, _, model = make_device()
    prompt = list(range(30, 41))
    seq = make_seq(1, prompt, GREEDY, pooling=pooling)
    running.enter(seq, len(prompt))
    with torch.no_grad():
        hidden_TD = model(torch.tensor(prompt), ListStep([ListCache()], [len(prompt)]))
    for start, stop in [(0, 4), (4, 8), (8, 11)]:
        result = device.run(running.order(Chunk(1, start, stop, 0), step=1)).wait()
        assert result.ids == [()]
        if pooling == "last" and stop < 11:
            assert not result.pooled
            continue
        expected = (hidden_TD[-1] if pooling == "last" else hidden_TD[start:stop].sum(dim=0)).double()
        assert torch.allclose(torch.from_numpy(result.pooled[0]), expected, atol=1e-4)

"""An embedding is a request like any other: chunks in shared steps, and the hidden states of transformers."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from infer.cache.paged_pool import PagedKVCachePool
from infer.engine import machine
from infer.engine.engine import Engine
from infer.errors import QueueFull, RequestError
from infer.execution.embedding import pool_hidden
from infer.execution.gpu.device import GpuDevice
from infer.execution.row_book import RowBook
from infer.scheduling.plan import Chunk
from infer.scheduling.request import Request, StepOutput
from infer.scheduling.sequence import Sequence, SequenceGroup
from scripts.make_checkpoint import make_checkpoint
from tests.support.running import Running
from tests.support.thinned import thinned
from tests.support.tiny import CONTEXT_LEN, SIZES, drain, greedy, make_engine, random_prompts, run_engine

PROMPTS = [*random_prompts(6, longest=50), list(range(5, 5 + CONTEXT_LEN))]  # the last fills the context
FAMILIES = ("llama", "gemma3", "gpt2")


@functools.cache
def reference(family: str) -> list[torch.Tensor]:
    """The hidden states of every prompt, by transformers, from the same weights as `tiny_model`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / family
        make_checkpoint(family, path, sizes=SIZES, seed=1)
        model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def pooled_reference(family: str, pooling: str) -> torch.Tensor:
    return torch.stack([states[-1] if pooling == "last" else states.mean(0) for states in reference(family)])


def add_embeddings(engine: Engine, pooling: str) -> None:
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(request_id=f"e{number}", prompt=tuple(prompt), pooling=pooling))


def vectors_of(outputs: list[StepOutput]) -> torch.Tensor:
    """The embeddings by the number of their prompt; each must have exactly one output."""
    made = {output.request_id: output for output in outputs if output.request_id.startswith("e")}
    assert all(output.finish_reason == "stop" and not output.token_ids for output in made.values()), made
    return torch.tensor([made[f"e{number}"].embedding for number in range(len(PROMPTS))])


@pytest.fixture(params=["host", "device"])
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device half of a CPU, or that of a GPU over the references of its kernels."""
    if request.param == "device":
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    yield request.param


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_batch_size": 4},
    "preempted": {"num_blocks": 5, "max_num_batched_tokens": 16},
}


@pytest.mark.parametrize(("family", "pooling", "way"), thinned(FAMILIES, ("last", "mean"), WAYS, keep=3))
def test_every_way_through_the_engine_gives_the_states_of_transformers(
    half: str, family: str, pooling: str, way: str
) -> None:
    knobs = WAYS[way]
    engine = make_engine(family, **knobs)
    assert isinstance(engine._device, GpuDevice) == (half == "device")
    neighbours = [(prompt, greedy(5)) for prompt in PROMPTS[:3]]
    alone = run_engine(make_engine(family, **knobs), neighbours)
    for number, (prompt, params) in enumerate(neighbours):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    add_embeddings(engine, pooling)

    outputs = drain(engine)

    wanted = pooled_reference(family, pooling)
    torch.testing.assert_close(vectors_of(outputs), wanted.float(), atol=2e-4, rtol=2e-4)
    for number, ids in enumerate(alone):
        made = [i for output in outputs if output.request_id == str(number) for i in output.token_ids]
        assert made == ids[0], "an embedding beside it changes no token"


def test_a_second_embedding_of_a_text_is_found_in_the_prefix_cache_unless_it_is_a_mean(half: str) -> None:
    engine = make_engine()
    prompt = tuple(PROMPTS[-1])
    made = {}
    for name, pooling in [("a", "last"), ("b", "last"), ("c", "mean"), ("d", "mean")]:
        engine.add(Request(request_id=name, prompt=prompt, pooling=pooling))
        (made[name],) = drain(engine)
    assert [made[name].num_cached for name in "abcd"] == [0, 48, 0, 0]
    torch.testing.assert_close(
        torch.tensor(made["a"].embedding), torch.tensor(made["b"].embedding), atol=1e-5, rtol=1e-5
    )
    assert made["c"].embedding == made["d"].embedding


def test_a_chunk_in_the_middle_gives_nothing_whatever_the_type_of_the_states() -> None:
    states_TD = torch.ones(4, 3, dtype=torch.bfloat16)
    group = SequenceGroup(
        Request(request_id="e", prompt=(1,) * 9, pooling="last"), max_total=10, stop_ids=(), seed=0
    )
    running, book = Running(PagedKVCachePool(8, 4)), RowBook()
    running.enter(Sequence(7, group, 0, [1] * 9), 9)
    order = running.order(Chunk(7, 0, 4, 0))
    book.enter(order)
    assert pool_hidden(order, book, [3], states_TD).by_number() == {}
    order = running.order(Chunk(7, 5, 9, 0))
    assert pool_hidden(order, book, [3], states_TD).by_number()[0].tolist() == [1.0, 1.0, 1.0]


def test_tokens_are_made_beside_the_chunks_of_a_long_embedding() -> None:
    engine = make_engine(max_num_batched_tokens=8, prefill_tokens_while_decoding=4)
    engine.add(Request(request_id="decodes", prompt=(5, 6), params=greedy(20)))
    engine.step()
    engine.add(Request(request_id="e", prompt=tuple(PROMPTS[-1]), pooling="mean"))
    order = [output.request_id for output in drain(engine)]
    assert order.index("e") >= 14, "four tokens of the embedding beside each token of the other"


def test_an_embedding_can_be_aborted_half_way() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add(Request(request_id="e", prompt=tuple(PROMPTS[-1]), pooling="mean"))
    engine.step()
    (ended,) = engine.abort("e")
    assert (ended.finish_reason, ended.embedding) == ("abort", ())
    assert drain(engine) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (1,) * (CONTEXT_LEN + 1)}, f"context length is {CONTEXT_LEN}"),
        ({"prompt": (1,) * 50, "num_blocks": 3}, "has 50 tokens, but .* is 49 tokens"),
        ({"prompt": (10**6,)}, "ids 0 to"),
        ({"prompt": (1,), "pooling": "max"}, "pooling must be one of last, mean"),
        ({"prompt": (1,), "params": greedy(1, n=2)}, "no n, best_of"),
    ],
)
def test_what_can_never_be_embedded_is_refused_before_it_waits(fields: dict[str, Any], message: str) -> None:
    engine = make_engine(num_blocks=fields.pop("num_blocks", 64))
    with pytest.raises(RequestError, match=message):
        engine.add(Request(request_id="e", **({"pooling": "last"} | fields)))
    assert not engine.has_work


def test_embeddings_and_requests_share_the_places_to_wait() -> None:
    engine = make_engine(max_queue=2, max_batch_size=1)
    for number in range(3):
        engine.add(Request(request_id=str(number), prompt=(5,), pooling="last"))
    with pytest.raises(QueueFull, match="max_queue is 2"):
        engine.add(Request(request_id="3", prompt=(5,)))
    assert len(drain(engine)) == 3

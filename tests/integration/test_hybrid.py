"""Models with layers of linear attention get the tokens of `transformers`, whatever happens to their states.

Every greedy output is checked by one forward pass of the reference over prompt and output, without a cache.
The store is full of NaN at first, so a state that is read and was not written shows, and so does one that is
read in the middle of its block or after it was given to another sequence.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from infer.cache.layout import STATE, StateSize
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.build import build_engine
from infer.engine.cache_fit import kept_cache
from infer.engine.device_build import resolve_for
from infer.engine.engine import Engine
from infer.errors import ConfigError
from infer.execution.gpu.device import GpuDevice
from infer.execution.torch_device import TorchDevice
from infer.loader.load import LoadedModel
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.speculative.proposer import Proposer, Wish
from tests.support.books import check_books
from tests.support.checkpoints import HYBRID_FAMILIES, VOCAB_SIZE
from tests.support.referenced import COSTS, engine_of_nan, load_pair, serve_checked
from tests.support.thinned import thinned
from tests.support.tiny import drain, greedy, run_engine

CONTEXT_LEN, BLOCK_SIZE, NUM_OUT = 320, 16, 20
FAMILIES = list(HYBRID_FAMILIES)


@functools.cache
def models(family: str) -> tuple[Any, LoadedModel]:
    return load_pair(family, max_position_embeddings=CONTEXT_LEN)


def make_engine(family: str, **knobs: Any) -> Engine:
    plain = {"block_size": BLOCK_SIZE, "num_blocks": 100, "prefill_chunk_size": 13, "max_batch_size": 4}
    return engine_of_nan(models(family)[1], **(plain | knobs))


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many blocks and of less than one; some begin alike, one is a whole number of blocks."""
    rng = random.Random(3)
    start = [rng.randrange(3, VOCAB_SIZE) for _ in range(96)]
    parts = [(96, 60), (0, 130), (61, 30), (96, 0), (20, 7), (0, 1), (64, 1), (0, 3)]
    prompts = [start[:cut] + [rng.randrange(3, VOCAB_SIZE) for _ in range(more)] for cut, more in parts]
    return [(prompt, greedy(NUM_OUT)) for prompt in prompts]


REQUESTS = make_requests()
GROWING = [(prompt[-3:], greedy(60)) for prompt, _ in REQUESTS]  # admitted together, they outgrow the cache
SMALL = 8  # blocks, for these


def serve(engine: Engine, family: str, requests: list[tuple[list[int], SamplingParams]] = REQUESTS) -> None:
    serve_checked(engine, models(family)[0], requests)


WAYS: dict[str, dict[str, Any]] = {  # every second one is slow
    "as it is": {},
    "nothing cached": {"use_prefix_caching": False},
    "small chunks": {"prefill_chunk_size": 3},
    "whole prompts": {"use_chunked_prefill": False},
    "large blocks": {"block_size": 32, "prefill_chunk_size": 100},
    "the reference of attention": {"attention_backend": "torch_ref"},
    "two backends": {"attention_backend": "sdpa", "decode_attention_backend": "torch_ref"},
}


@pytest.mark.parametrize("way", thinned(WAYS, keep=2))
def test_the_tokens_are_those_of_transformers(way: str) -> None:
    engine = make_engine("qwen3_5", **WAYS[way])
    serve(engine, "qwen3_5")
    if way in ("as it is", "small chunks"):
        serve(engine, "qwen3_5")  # now with all that is cached
        assert engine.scheduler.usage().num_hit_tokens > 250


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers(family: str) -> None:
    engine = make_engine(family)
    serve(engine, family, REQUESTS[:5])
    serve(engine, family, REQUESTS[:5])
    assert engine.scheduler.usage().num_hit_tokens > 200


@pytest.mark.parametrize("family", ["qwen3_5"])
@pytest.mark.parametrize("swap_blocks", [0, 80])
def test_preemption_changes_no_token(family: str, swap_blocks: int) -> None:
    preemption = "swap" if swap_blocks else "recompute"
    engine = make_engine(family, preemption=preemption, swap_blocks=swap_blocks, num_blocks=SMALL)
    serve(engine, family, GROWING)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", thinned(FAMILIES, keep=2))
def test_so_are_those_of_a_gpus_device_half(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine = make_engine(family)
    requests = REQUESTS if family == "qwen3_5" else REQUESTS[2:]  # those but the longest
    serve(engine, family, requests)
    serve(engine, family, requests)
    engine = make_engine(family, preemption="recompute", num_blocks=SMALL)
    assert isinstance(engine._device, GpuDevice)
    serve(engine, family, GROWING)
    assert engine.scheduler.num_preemptions > 0


def test_rare_orders_of_padding_leave_the_states_of_cached_prefixes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that woke may have served requests before the warm-up comes to these orders."""
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    engine, (prompt, params) = make_engine("qwen3_5"), REQUESTS[0]
    serve(engine, "qwen3_5", [(prompt, params)])
    device, before = engine._device, engine.scheduler.usage().num_hit_tokens
    assert isinstance(device, GpuDevice)
    for order, masks in device.rare_orders():
        device.run_half(order, masks)
    serve(engine, "qwen3_5", [(prompt[:BLOCK_SIZE] + [7, 8, 9] * 6, params)])
    assert engine.scheduler.usage().num_hit_tokens == before + BLOCK_SIZE


@pytest.mark.parametrize("length", [32, 33, 37])
def test_a_hit_goes_on_from_the_state_of_a_whole_block(length: int) -> None:
    """A prompt that is cached to its last token has no state one token before its end."""
    engine, prompt = make_engine("qwen3_5"), REQUESTS[1][0]
    serve(engine, "qwen3_5", [(prompt[:length], greedy(NUM_OUT))])
    before = engine.scheduler.usage().num_hit_tokens
    serve(engine, "qwen3_5", [(prompt[:length], greedy(NUM_OUT))])
    assert engine.scheduler.usage().num_hit_tokens - before == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_keys_without_a_state_are_no_hit() -> None:
    """States are evicted before keys; what is left of a prefix then is of no use."""
    engine, (prompt, params) = make_engine("qwen3_5", num_blocks=40), REQUESTS[1]
    serve(engine, "qwen3_5", [(prompt, params)])
    pool = engine.scheduler.pool
    assert pool.windows == (None, STATE)
    states = [node.blocks[1] for node in pool.tree._nodes.values() if node.blocks[1] >= 0]
    assert len(states) > 5
    for block in states:
        pool.tree.forget(block)
    before = engine.scheduler.usage().num_hit_tokens
    serve(engine, "qwen3_5", [(prompt, params)])
    assert engine.scheduler.usage().num_hit_tokens == before


@pytest.mark.parametrize("family", ["qwen3_5"])
@pytest.mark.parametrize(("kind", "knobs"), thinned(("n", "beams"), ({}, {"num_blocks": 22}), keep=2))
def test_forks_have_states_of_their_own(family: str, kind: str, knobs: dict[str, Any]) -> None:
    """Each output's logprob is the one that the reference finds for its tokens."""
    asked: dict[str, dict[str, Any]] = {
        "n": {"temperature": 1.0, "seed": 5, "n": 4, "ignore_eos": True, "logprobs": 0},
        "beams": {"temperature": 0.0, "use_beam_search": True, "n": 3},
    }
    engine, outputs = make_engine(family, **knobs), dict[tuple[str, int], list[int]]()
    logprobs = dict[tuple[str, int], float]()
    prompts = [REQUESTS[number][0] for number in (2, 4, 3)]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(**asked[kind], max_tokens=NUM_OUT)
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    for output in drain(engine):
        key = output.request_id, output.index
        outputs.setdefault(key, []).extend(output.token_ids)
        logprobs[key] = output.cumulative_logprob
    assert len(outputs) == len(prompts) * asked[kind]["n"]
    for key, ids in outputs.items():
        prompt = prompts[int(key[0])]
        with torch.no_grad():
            logits_TV = models(family)[0](input_ids=torch.tensor([prompt + ids])).logits[0]
        expected = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert logprobs[key] == pytest.approx(float(expected.sum()), abs=1e-3)


def test_an_abort_gives_states_back() -> None:
    engine = make_engine("qwen3_5")
    for number, (prompt, params) in enumerate(REQUESTS):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    for _ in range(9):
        engine.step()
    for number in range(0, len(REQUESTS), 2):
        engine.abort(str(number))
    drain(engine)
    engine.scheduler.pool.reset_prefix_cache()
    assert engine.scheduler.pool.num_free_blocks == engine.scheduler.pool.num_blocks


def test_a_block_holds_a_state() -> None:
    engine = make_engine("qwen3_5", block_size=2)
    assert engine.scheduler.pool.block_size == 16
    serve(engine, "qwen3_5", REQUESTS[:3])
    real = StateSize(32, (128, 128), (3, 8192))
    assert real.min_block_size(2 * 256 * 2) == 1024  # half of 32 heads of 64 KiB in tokens of 1 KiB
    assert real.min_block_size(4 * 256 * 2) == 512
    assert real.min_block_size(3 * 256 * 2) == 1024  # 682.7 tokens, up to a power of two


def test_the_plan_counts_states() -> None:
    """A sequence of one token takes a block of each table; bytes of the store are those of the plan."""
    engine = make_engine("qwen3_5")
    device, pool = engine._device, engine.scheduler.pool
    assert isinstance(device, TorchDevice)
    kept = kept_cache(resolve_for(EngineConfig.from_knobs(), models("qwen3_5")[1]), models("qwen3_5")[1])
    assert len(kept.layout.windows) == 2 and pool.blocks_of(1) == 2
    assert device.store.num_bytes == pool.num_blocks * BLOCK_SIZE * kept.bytes_per_token // 2


REPEATING = [((prompt * 9)[: 40 + 7 * number], greedy(40)) for number, (prompt, _) in enumerate(GROWING[:4])]
# adaptive speculation weighs the times of steps: these tests want drafts in every step that can have some
GUESSES: dict[str, Any] = {"speculative_decoding": True, "adaptive_speculation": False, "num_blocks": 60}


class RightAndWrong(Proposer):
    """A proposer that knows the answers, and says a wrong token after a few right ones."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers

    def propose(self, wishes: Seq[Wish]) -> list[Seq[int]]:
        found: list[Seq[int]] = []
        for wish in wishes:
            text, length = list(wish.tokens), len(wish.tokens)
            known = next(answer for answer in self.answers if answer[:length] == text)[length:]
            num_right = length % (wish.num_drafts + 1)
            found.append([*known[:num_right], 1, 1][: wish.num_drafts])
        return found

    def has_match(self, wish: Wish) -> bool:
        return True

    def finish(self, wish: Wish) -> None:
        pass


_PLAIN: dict[str, list[list[int]]] = {}


def plainly(requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """The answers of an engine without drafts, computed once for equal requests."""
    if (key := repr(requests)) not in _PLAIN:
        plain = make_engine("qwen3_5", use_prefix_caching=False)
        _PLAIN[key] = [output for (output,) in run_engine(plain, requests)]
    return _PLAIN[key]


def speculate(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """The texts of requests whose drafts are partly right; several are kept and several refused."""
    expected = plainly(requests)
    assert engine.speculation is not None
    texts = [prompt + output for (prompt, _), output in zip(requests, expected, strict=True)]
    engine.speculation._proposer = RightAndWrong(texts)
    assert [output for (output,) in run_engine(engine, requests)] == expected
    totals = engine.speculation.totals
    assert 20 < totals.num_accepted < totals.num_drafts - 20
    pool = engine.scheduler.pool
    pool.reset_prefix_cache()
    assert pool.num_free_blocks == pool.num_blocks and not pool.audit_blocks()
    return expected


@pytest.mark.parametrize(("on_gpu", "sampled"), thinned((False, True), (False, True), keep=2))
def test_drafts_change_no_token(on_gpu: bool, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_gpu:
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
    requests = [(prompt, params if sampled else asked) for prompt, asked in REPEATING]
    for knobs in ({}, {"num_speculative_tokens": 2}, {"attention_backend": "torch_ref"}):
        if not on_gpu or "attention_backend" not in knobs:
            speculate(make_engine("qwen3_5", **GUESSES, **knobs), requests)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_steps_that_are_timed_at_the_start_leave_no_state(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:
        monkeypatch.setattr(machine, "has_gpu_kernels", lambda device: True)
    knobs: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_batch_size": 4, **GUESSES}
    engine = build_engine(EngineConfig.from_knobs(**knobs), models("qwen3_5")[1])
    assert engine.speculation is not None and engine.speculation.costs != COSTS
    speculate(engine, REPEATING)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_drafts_of_sequences_that_are_preempted_change_no_token(preemption: str) -> None:
    knobs = GUESSES | {"num_blocks": SMALL + 2, "swap_blocks": 80, "preemption": preemption}
    engine = make_engine("qwen3_5", **knobs)
    speculate(engine, GROWING)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("family", "method"), thinned(FAMILIES, ("ngram", "suffix"), keep=3))
def test_texts_that_repeat_themselves_are_looked_up(family: str, method: str) -> None:
    engine = make_engine(family, **GUESSES, speculative_method=method)
    for _ in range(2):  # what was cached after drafts serves the same texts again
        serve(engine, family, [(prompt, greedy(60)) for prompt, _ in REPEATING])
    assert engine.speculation is not None and engine.speculation.totals.num_drafts > 0


def test_an_abort_amid_drafts_gives_states_back() -> None:
    engine = make_engine("qwen3_5", **GUESSES)
    for number, (prompt, params) in enumerate(REPEATING):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=params))
    for number in range(len(REPEATING)):
        for _ in range(5 + number):
            engine.step()
            check_books(engine.scheduler)
        engine.abort(str(number))
        check_books(engine.scheduler)
    drain(engine)
    engine.scheduler.pool.reset_prefix_cache()
    assert engine.scheduler.pool.num_free_blocks == engine.scheduler.pool.num_blocks


@pytest.mark.parametrize(
    "knobs",
    [
        {"speculative_decoding": True, "draft_model": "any"},
        {"deterministic": True},
        {"kv_cache_backend": "contiguous"},
        {"kv_cache_dtype": "int8"},
    ],
)
def test_what_states_cannot_do_is_refused_by_name(knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="keep a state"):
        make_engine("qwen3_5", **knobs)

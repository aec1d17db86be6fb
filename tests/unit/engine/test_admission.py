"""What can never be served is refused at once; whatever is let in can be finished."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.policies import SLOW_MACHINE
from infer.bench.simulated import SimulatedDevice
from infer.cache.paged_pool import PagedKVCachePool
from infer.engine.admission import check_order, check_token_ids, check_width, longest_total
from infer.engine.engine import Engine
from infer.errors import ContextOverflow, RequestError
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from tests.support.oracle import OracleWorld, prompt_of


def make_request(num_prompt: int, **params: Any) -> Request:
    return Request(
        request_id="r",
        prompt=tuple(range(num_prompt)),
        params=SamplingParams(**({"temperature": 0.0} | params)),
    )


def contiguous(num_sequences: int, max_seq_len: int) -> PagedKVCachePool:
    return PagedKVCachePool(num_sequences, max_seq_len, use_prefix_caching=False, max_blocks_per_sequence=1)


def paged(num_tokens: int, block_size: int = 4) -> PagedKVCachePool:
    return PagedKVCachePool(num_tokens // block_size, block_size)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="the prompt has no tokens; give at least one") as caught:
        check_token_ids(make_request(0), 10)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 2**80}, "priority must be from .*, got a number of 81 bits"),
        ({"deadline": float("nan")}, "deadline must be a finite number of seconds, got nan"),
        ({"deadline": float("-inf")}, "got -inf"),
        ({"deadline": 10**400}, "got an integer of too many digits"),
    ],
)
def test_an_order_that_no_queue_can_keep_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_order(replace(make_request(3), **options))


@pytest.mark.parametrize(
    ("params", "num_prompt", "param"),
    [
        ({}, 11, "prompt"),
        ({"logit_bias": {10: 1.0}}, 3, "logit_bias"),
        ({"stop_token_ids": (3, 99)}, 3, "stop_token_ids"),
    ],
)
def test_ids_the_model_does_not_have_are_refused(params: dict[str, Any], num_prompt: int, param: str) -> None:
    with pytest.raises(
        RequestError, match=f"{param} holds token id .*, but this model has ids 0 to 9"
    ) as caught:
        check_token_ids(make_request(num_prompt, **params), 10)
    assert caught.value.param == param


def test_negative_ids_are_refused() -> None:
    request = Request(request_id="r", prompt=(3, -1, 4))
    with pytest.raises(RequestError, match="token id -1"):
        check_token_ids(request, 10)


@pytest.mark.parametrize("wrong", [-1, 10, 2**31, 2**32, 2**80, -(2**80)])
def test_one_wrong_id_of_a_long_prompt_is_found(wrong: int) -> None:
    prompt = [*range(10)] * 50
    prompt[321] = wrong
    with pytest.raises(RequestError, match=f"prompt holds token id {wrong}, but"):
        check_token_ids(Request(request_id="r", prompt=tuple(prompt)), 10)


@pytest.mark.parametrize("num_repeats", [1, 50])
def test_the_first_and_the_last_id_are_fine(num_repeats: int) -> None:
    request = make_request(10, stop_token_ids=(0, 9))
    prompt = request.prompt * num_repeats
    packed = check_token_ids(replace(request, prompt=prompt), 10)
    assert tuple(packed) == prompt and packed.itemsize == 4


def test_more_sequences_than_may_run_at_once_are_refused() -> None:
    check_width(make_request(3, n=4), 4, 2)
    with pytest.raises(RequestError, match="asks for 5 sequences, but max_batch_size is 4") as caught:
        check_width(make_request(3, n=5), 4, 8)
    assert caught.value.param == "n"
    with pytest.raises(RequestError) as caught:
        check_width(make_request(3, n=2, best_of=5), 4, 8)
    assert caught.value.param == "best_of"
    with pytest.raises(RequestError, match="asks for 3 beams, which advance together, but .*=2 tokens"):
        check_width(make_request(3, n=3, use_beam_search=True, temperature=0.0), 4, 2)


def test_the_context_holds_the_prompt_and_the_whole_output() -> None:
    assert longest_total(make_request(6, max_tokens=4), 10, paged(64)) == 10
    with pytest.raises(ContextOverflow, match="set max_tokens <= 4"):
        longest_total(make_request(6, max_tokens=5), 10, paged(64))


def test_a_prompt_that_leaves_no_room_for_a_token_is_refused() -> None:
    assert longest_total(make_request(9, max_tokens=None), 10, paged(64)) == 10
    with pytest.raises(ContextOverflow, match="shorten the prompt") as caught:
        longest_total(make_request(10, max_tokens=None), 10, paged(64))
    assert caught.value.param == "prompt"


def test_without_max_tokens_the_output_may_fill_context_or_cache_whichever_is_less() -> None:
    assert longest_total(make_request(6, max_tokens=None), 40, paged(64)) == 40
    # 16 tokens of cache: the 17th is sampled and never computed
    assert longest_total(make_request(6, max_tokens=None), 40, paged(16)) == 17


def test_a_request_larger_than_the_whole_cache_is_refused() -> None:
    assert longest_total(make_request(6, max_tokens=11), 40, paged(16)) == 17
    with pytest.raises(RequestError, match="need 17 tokens of cache, but the whole cache holds 16"):
        longest_total(make_request(6, max_tokens=12), 40, paged(16))
    with pytest.raises(RequestError, match="the whole cache holds 16"):
        longest_total(make_request(20, max_tokens=None), 40, paged(16))


def test_beams_must_fit_side_by_side_and_other_sequences_need_not() -> None:
    beams = {"n": 3, "use_beam_search": True}
    assert longest_total(make_request(6, max_tokens=11, n=3), 40, paged(16)) == 17
    with pytest.raises(RequestError, match="in each of 3 beams"):
        longest_total(make_request(6, max_tokens=11, **beams), 40, paged(16))
    assert longest_total(make_request(6, max_tokens=11, **beams), 40, paged(48)) == 17


def test_a_contiguous_cache_gives_each_sequence_one_slot() -> None:
    pool = contiguous(3, 20)
    assert longest_total(make_request(6, max_tokens=14), 20, pool) == 20
    assert longest_total(make_request(6, max_tokens=None), 20, pool) == 20
    with pytest.raises(RequestError, match="in each of 4 beams"):
        longest_total(make_request(6, max_tokens=4, n=4, use_beam_search=True), 20, pool)


@pytest.mark.parametrize(
    ("pool", "longest"),
    [
        (paged(16), 16),
        (contiguous(3, 20), 20),
        (PagedKVCachePool(4, 4, windows=(4,), max_chunk=4), 99),  # the context, as windows free blocks
        (PagedKVCachePool(8, 4, windows=(None, 4, 4, 4), max_chunk=4), 8),
    ],
    ids=["one table", "contiguous", "windows", "several tables"],
)
def test_an_embedding_may_be_as_long_as_a_sequence_that_fits(pool: PagedKVCachePool, longest: int) -> None:
    def total(num_prompt: int) -> int:
        return longest_total(Request(request_id="r", prompt=(1,) * num_prompt, pooling="mean"), 99, pool)

    assert total(longest) == longest + 1
    refusal = "the whole cache holds 8 of one sequence" if longest == 8 else f"{longest}"
    with pytest.raises(RequestError, match=refusal):
        total(longest + 1)


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"n": 3, "use_beam_search": True, "temperature": 0.0}])
def test_whatever_is_let_in_finishes_in_a_cache_it_only_just_fits(
    params: dict[str, Any], block_size: int
) -> None:
    """The largest output that is not refused, in the smallest cache."""
    num_blocks = 24 // block_size
    width = 3 if "use_beam_search" in params else 1
    max_tokens = num_blocks // width * block_size + 1 - 5
    world = OracleWorld(num_blocks=num_blocks, block_size=block_size, context_len=200)
    with pytest.raises(RequestError):
        world.add("too long", prompt_of(5), max_tokens=max_tokens + 1, **params)
    world.add("largest", prompt_of(5), max_tokens=max_tokens, **params)
    world.add("other", prompt_of(5, start=3), max_tokens=3)
    world.run()
    assert world.verify() == 2


def test_an_embedding_needs_a_device_half_that_pools() -> None:
    """Else it would compute its prompt and then wait for ever."""
    world = OracleWorld()
    engine = Engine(world.scheduler, SimulatedDevice(SLOW_MACHINE), context_len=32, vocab_size=100)
    with pytest.raises(RequestError, match="this engine cannot embed"):
        engine.add(Request(request_id="r", prompt=(1, 2), pooling="last"))
    assert not engine.has_work

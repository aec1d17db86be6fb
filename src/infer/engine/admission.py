"""Admission: refuses a request that can never be served, at once and with the reason.

There are three limits: the ids must exist, prompt + output must fit the model's context, and the sequence
must fit the KV cache when it runs alone. An admitted request can always be finished: at worst all other
sequences are preempted and it runs alone.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection

import numpy as np

from infer.cache.paged_pool import PagedKVCachePool
from infer.errors import ContextOverflow, QueueFull, RequestError
from infer.scheduling.request import POOLINGS, Request
from infer.scheduling.scheduler import Scheduler
from infer.scheduling.sequence import SequenceGroup

MAX_PRIORITY = 2**63 - 1
SEED_STRIDE = 0x9E3779B97F4A7C15  # odd and large, so that different engine seeds give different request seeds
MAX_DEADLINE = sys.float_info.max


def admit(
    request: Request,
    scheduler: Scheduler,
    *,
    number: int,
    context_len: int,
    vocab_size: int,
    eos_ids: tuple[int, ...],
    num_compiling: int,
) -> tuple[SequenceGroup, array[int]]:
    """Check a request against model, cache and queue; return its group and its prompt's ids.

    A request without a seed gets one derived from its `number`, so that equal runs give equal answers.
    """
    params, config = request.params, scheduler.config
    # queued sequences that the next step admits into free batch places do not count as waiting
    num_queued = scheduler.num_waiting + num_compiling - scheduler.num_free_places
    if config.max_queue is not None and num_queued >= config.max_queue:
        raise QueueFull.of(num_queued, config.max_queue)
    if params.use_beam_search and not scheduler.keeps_cache:
        raise RequestError("beam search needs a KV cache, and kv_cache_backend=naive keeps none")
    tokens = check_token_ids(request, vocab_size)
    check_order(request)
    check_pooling(request)
    check_width(request, config.max_batch_size, config.max_num_batched_tokens)
    max_total = longest_total(request, context_len, scheduler.pool)
    stop_ids = params.stop_token_ids if params.ignore_eos else (*eos_ids, *params.stop_token_ids)
    seed = seed_of(request, scheduler, number)
    group = SequenceGroup(request, max_total=max_total, stop_ids=tuple(dict.fromkeys(stop_ids)), seed=seed)
    return group, tokens


def seed_of(request: Request, scheduler: Scheduler, number: int) -> int:
    """Return the seed of the `number`-th request: its own, or one derived from the number."""
    seed = request.params.seed
    return scheduler.config.seed * SEED_STRIDE + number if seed is None else seed


def check_token_ids(request: Request, vocab_size: int) -> array[int]:
    """Refuse ids outside the vocabulary; return the prompt's ids as a packed array.

    Only this function walks over the Python integers of a long prompt. Everything later reads the packed
    array of 32-bit ids, which numpy and the prefix tree use without conversion.
    """
    if not request.prompt:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    try:
        packed = array("I", request.prompt)
    except OverflowError:  # negative, or beyond any vocabulary
        _check_range("prompt", request.prompt, vocab_size)
        raise
    if np.frombuffer(packed, dtype=np.uintc).max() >= vocab_size:
        _check_range("prompt", request.prompt, vocab_size)
    _check_range("logit_bias", request.params.logit_bias, vocab_size)
    _check_range("stop_token_ids", request.params.stop_token_ids, vocab_size)
    _check_range("allowed_token_ids", request.params.allowed_token_ids, vocab_size)
    _check_range(
        "banned_ids", [token_id for word in request.params.banned_ids for token_id in word], vocab_size
    )
    if (reasoning := request.params.reasoning) is not None:
        _check_range("reasoning", (reasoning.end_id, *reasoning.forced, *reasoning.later), vocab_size)
    return packed


def _check_range(param: str, ids: Collection[int], vocab_size: int) -> None:
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < vocab_size:
            raise RequestError.about(
                param, f"holds token id {token_id}, but this model has ids 0 to {vocab_size - 1}"
            )


def check_order(request: Request) -> None:
    """Refuse a priority or a deadline that the queue cannot be sorted by."""
    if not -MAX_PRIORITY - 1 <= request.priority <= MAX_PRIORITY:
        shown = f"a number of {request.priority.bit_length()} bits"
        raise RequestError.about(
            "priority", f"must be from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}, got {shown}"
        )
    if request.deadline is not None and not -MAX_DEADLINE <= request.deadline <= MAX_DEADLINE:
        is_huge = isinstance(request.deadline, int)  # Python refuses to print integers this long
        shown = "an integer of too many digits" if is_huge else f"{request.deadline}"
        raise RequestError.about("deadline", f"must be a finite number of seconds, got {shown}")


def check_pooling(request: Request) -> None:
    """Refuse an unknown pooling, and parameters that an embedding cannot be combined with."""
    if request.pooling is None:
        return
    if request.pooling not in POOLINGS:
        raise RequestError.about("pooling", f"must be one of {', '.join(POOLINGS)}, got {request.pooling!r}")
    params = request.params
    if params.num_sequences > 1 or params.prompt_logprobs is not None or params.structured is not None:
        raise RequestError(
            "an embedding has no n, best_of, beams, prompt_logprobs or structured; leave them out",
            param="pooling",
        )


def check_width(request: Request, max_batch_size: int, budget: int) -> None:
    """Refuse more sequences than may ever run side by side, and more beams than one step can serve."""
    params, param = request.params, "n" if request.params.best_of is None else "best_of"
    if params.use_beam_search and params.num_sequences > budget:
        raise RequestError(
            f"the request asks for {params.num_sequences} beams, which advance together, but a step computes "
            f"at most max_num_batched_tokens={budget} tokens; ask for fewer beams",
            param=param,
        )
    if params.num_sequences > max_batch_size:
        raise RequestError(
            f"the request asks for {params.num_sequences} sequences, but max_batch_size is {max_batch_size}; "
            "lower n or best_of",
            param=param,
        )


def longest_total(request: Request, context_len: int, pool: PagedKVCachePool) -> int:
    """Return the length limit of each sequence, prompt included; without max_tokens, as long as it fits.

    The last token of an output is never computed, so it takes no space in the cache. Beams advance
    together, so they must fit together.
    """
    params, num_prompt = request.params, len(request.prompt)
    if request.pooling is not None:
        return _pooled_total(num_prompt, context_len, pool)
    max_total = context_len if params.max_tokens is None else num_prompt + params.max_tokens
    if num_prompt >= context_len or max_total > context_len:
        raise ContextOverflow(num_prompt, params.max_tokens or 1, context_len)
    width = params.num_sequences if params.use_beam_search else 1
    capacity = pool.longest(width) + 1
    if params.max_tokens is None and num_prompt < capacity:
        max_total = min(max_total, capacity)
    if max_total <= capacity and pool.can_ever_fit(max_total - 1):
        return max_total
    beams = f" in each of {width} beams" if width > 1 else ""
    raise RequestError(
        f"prompt and max_tokens need {max_total - 1} tokens of cache{beams}, but the whole cache holds "
        f"{pool.longest()}; shorten the prompt or lower max_tokens (the settings "
        "kv_cache_memory and num_blocks give the cache its size)",
        param="max_tokens",
    )


def _pooled_total(num_prompt: int, context_len: int, pool: PagedKVCachePool) -> int:
    """Return the length limit of an embedding: its prompt, plus one token that is never sampled."""
    if num_prompt > context_len:
        raise ContextOverflow(num_prompt, 0, context_len)
    if pool.can_ever_fit(num_prompt):
        return num_prompt + 1
    raise RequestError(
        f"the input needs {num_prompt} tokens of cache, but the whole cache holds {pool.longest()} of one "
        "sequence; shorten it (the settings kv_cache_memory and num_blocks give the cache its size)",
        param="prompt",
    )

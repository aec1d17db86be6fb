"""Load the weights of an `EngineConfig`, for an engine in a thread or in a process.

A forked child has none of its parent's threads, but PyTorch and OpenMP believe that the threads exist and
wait for them forever. So a process that was forked after its parent loaded a model computes with one thread.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import cache, partial

import torch

from infer.client.rank_group import RankProcesses
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.loader.headers import ModelHeaders
from infer.loader.load import LoadedModel, choose_device, load_model
from infer.loader.rank_placement import node_device, rank_device, rank_of, rank_threads
from infer.loader.weight_plan import plan_weights
from infer.tools.memory_plan import check_settings

logger = logging.getLogger(__name__)

_is_forked = False  # True: this process was forked after its parent had loaded a model


def load_weights(config: EngineConfig, headers: ModelHeaders, *, show_progress: bool = False) -> LoadedModel:
    """Load the model of a config, whose headers are given, and start its other ranks, if it has any.

    Settings that no engine can be built with are rejected before any weight is read.
    """
    load = config.load
    _notice_forks()
    if load.num_threads is not None:
        use_threads(load.num_threads)
    if load.num_ranks == 1:
        return load_part(config, headers, show_progress=show_progress)
    if load.node_rank > 0:
        raise ConfigError(f"node_rank={load.node_rank} only computes for node 0; start it with infer serve")
    check_ranks(config, headers)
    num_threads = rank_threads(load, torch.get_num_threads())
    ranks = RankProcesses(config, num_threads, node_device(load))
    try:
        use_threads(num_threads)
        loaded = load_part(config, headers, show_progress=show_progress)
        ranks.wait()
    except BaseException as error:
        ranks.close(f"rank 0 could not start: {str(error) or type(error).__name__}")
        raise
    return replace(loaded, ranks=ranks)


def load_part(
    config: EngineConfig, headers: ModelHeaders, number: int = 0, *, show_progress: bool = False
) -> LoadedModel:
    """Load the part of the rank with this number; the first rank checks the settings of all."""
    load, rank = config.load, rank_of(config.load, number)
    device = choose_device(rank_device(load, number))
    if not rank.is_alone and device.index is not None:
        torch.cuda.set_device(device)
    return load_model(
        headers.source,
        dtype=load.dtype,
        device=load.device if rank.is_alone else str(device),
        quantization=load.quantization,
        max_seq_len=load.max_seq_len,
        show_progress=show_progress,
        headers=headers,
        rank=rank,
        check=partial(check_settings, config) if number == 0 else lambda choice: None,
    )


def check_ranks(config: EngineConfig, headers: ModelHeaders) -> None:
    """Reject settings that ranks do not support, before any rank is started."""
    load, device, rank = config.load, node_device(config.load), rank_of(config.load, 0)
    plan = plan_weights(headers, quantization=load.quantization, dtype=load.dtype, device=device, rank=rank)
    plan.check_cuts()


def use_threads(number: int) -> None:
    """Compute with `number` threads on the CPU; more threads than CPUs are allowed, with a warning."""
    num_cpus = os.cpu_count() or 1
    if _is_forked and number > 1:
        logger.warning(
            "a forked child computes with one thread, as its parent had loaded a model; start it by spawn "
            "for more num_threads=%d",
            number,
        )
        return
    if number > num_cpus:
        logger.warning(
            "more threads than CPUs, so they wait for each other num_threads=%d cpus=%d", number, num_cpus
        )
    torch.set_num_threads(number)


@cache  # once per process
def _notice_forks() -> None:
    os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    global _is_forked
    _is_forked = True
    torch.set_num_threads(1)

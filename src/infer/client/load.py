"""The one way from an `EngineConfig` to loaded weights, for an engine in a thread and one in a process."""

from __future__ import annotations

import logging
import os
from functools import partial

import torch

from infer.config.settings import EngineConfig
from infer.loader.load import LoadedModel, ModelHeaders, load_model
from infer.tools.memory_plan import check_settings

logger = logging.getLogger(__name__)


def load_weights(config: EngineConfig, headers: ModelHeaders, *, show_progress: bool = False) -> LoadedModel:
    """Load the model of a config, whose headers these are.

    Settings that no engine could be built with are refused before a weight is read.
    """
    load = config.load
    if load.num_threads is not None:
        use_threads(load.num_threads)
    return load_model(
        headers.source,
        dtype=load.dtype,
        device=load.device,
        quantization=load.quantization,
        max_seq_len=load.max_seq_len,
        show_progress=show_progress,
        headers=headers,
        check=partial(check_settings, config),
    )


def use_threads(number: int) -> None:
    """Compute with so many threads on the CPU; more than it has are taken, with a warning."""
    num_cpus = os.cpu_count() or 1
    if number > num_cpus:
        logger.warning(
            "more threads than CPUs, so they wait for each other num_threads=%d cpus=%d", number, num_cpus
        )
    torch.set_num_threads(number)

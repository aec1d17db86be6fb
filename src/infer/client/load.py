"""The one way from an `EngineConfig` to loaded weights, for an engine in a thread and one in a process."""

from __future__ import annotations

from functools import partial

import torch

from infer.config.settings import EngineConfig
from infer.loader.load import LoadedModel, ModelHeaders, load_model
from infer.tools.memory_plan import check_settings


def load_weights(config: EngineConfig, headers: ModelHeaders, *, show_progress: bool = False) -> LoadedModel:
    """Load the model of a config, whose headers these are.

    Settings that no engine could be built with are refused before a weight is read.
    """
    load = config.load
    if load.num_threads is not None:
        torch.set_num_threads(load.num_threads)
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

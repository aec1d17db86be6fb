"""The facts `config/resolve.py` needs about this machine and about a model, loaded or about to be."""

from __future__ import annotations

import torch

from infer.config.machine_rules import Machine, ModelFacts
from infer.engine.cache_fit import state_size
from infer.engine.device_memory import device_limit
from infer.execution.cpu_step import attention_library
from infer.kernels.runtime.dispatch import device_kind, gpu_memory, is_gpu, nvidia_capability
from infer.kernels.runtime.nccl import nccl_version
from infer.kernels.runtime.profiles import device_profile
from infer.loader.load import LoadChoice, LoadedModel


def machine_of(loaded: LoadedModel | LoadChoice, device_memory: str | None = None) -> Machine:
    """Return the facts about this model's device; `device_memory` limits its memory."""
    device = loaded.device
    memory = gpu_memory(device)
    if memory is not None and device_memory is not None:
        memory = device_limit(device_memory, memory)
    return Machine(
        device=str(device),
        gpu_memory=memory,
        has_gpu_kernels=has_gpu_kernels(device),
        has_fp8=memory is None or nvidia_capability(device) >= (8, 9),
        profile=device_profile(device),
        has_c_attention=loaded.config.delta is None  # models with a delta rule run in plain PyTorch
        and attention_library(device, loaded.dtype, loaded.config.head_dim) is not None,
    )


def has_gpu_kernels(device: torch.device) -> bool:
    """True if the kernels that keep the batch state on the device run on this device."""
    return is_gpu(device)


def device_facts(device: torch.device) -> dict[str, str]:
    """Return the facts that must be equal for the devices of all ranks on several machines."""
    if not is_gpu(device):
        return {"device": device_kind(device)}
    return {"device": torch.cuda.get_device_name(device), "nccl": nccl_version()}


def gpu_name(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process; "": it has none."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def facts_of(loaded: LoadedModel | LoadChoice) -> ModelFacts:
    """Return the facts of this model that decisions depend on."""
    model, state = loaded.config, state_size(loaded.config)
    key_bytes = model.num_kv_heads * model.head_dim * loaded.dtype.itemsize
    return ModelFacts(
        max_seq_len=loaded.max_seq_len,
        num_layer_weights=loaded.config.all_layer_weights,
        num_layers=loaded.config.num_layers,
        dtype=str(loaded.dtype).removeprefix("torch."),
        weights=loaded.weights,
        published_as=loaded.published_as,
        kept_as=loaded.kept_as,
        has_kv_scales=loaded.kv_scales is not None,
        model_impl=loaded.config.impl,
        family=model.family,
        has_mixed_heads=bool(model.layer_specs),
        state_tokens=0 if state is None else state.min_block_size(key_bytes),
    )

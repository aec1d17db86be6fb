"""A model of any published shape with weights out of thin air: speed needs the shape, not the knowledge.

    config.json ──► the family's network, built on the device ──► filled there with random numbers

Nothing is read from disk and nothing crosses a bus, so eight billion parameters are ready in a second.
Matrices are drawn from a normal distribution of width 0.02, which keeps activations finite and the data
path busy: zeros would run faster than real weights do. Norm weights are one (zero where the family stores
them around zero), biases small. What such a model says is noise; how long it takes is not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from infer.errors import ConfigError
from infer.layers.norm import RMSNorm
from infer.loader.dtype import DTYPES, avoid_refused_products, choose_dtype, warn_if_slow
from infer.loader.formats.hf_config import read_hf_config
from infer.loader.load import LoadedModel, build_model, check_length, choose_device, refused_if_full
from infer.loader.quantization import AS_STORED, make_projections
from infer.models.model import Model
from infer.models.registry import find_family

WIDTH = 0.02


def load_random(
    config_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_seq_len: int | None = None,
    seed: int = 0,
) -> LoadedModel:
    """A random model of the shape in `config_dir/config.json`; it has no tokenizer and no end of text."""
    raw = read_hf_config(config_dir)
    family = find_family(raw)
    if raw.get("quantization_config"):
        raise ConfigError(
            f"{config_dir / 'config.json'} has a quantization_config, but random weights are plain numbers; "
            "use the config of the checkpoint that is not quantized"
        )
    config = family.read_config(raw)
    chosen_device = choose_device(device)
    stored = DTYPES.get(str(raw.get("dtype") or raw.get("torch_dtype")))
    chosen_dtype = choose_dtype(dtype, chosen_device, stored)
    avoid_refused_products(chosen_dtype, chosen_device)
    warn_if_slow(chosen_dtype, chosen_device)
    context_len = check_length(max_seq_len, config)
    built = config if config.learned_positions else replace(config, context_len=context_len)
    name = f"{config_dir.resolve().name} (random weights)"
    model = build_model(family, built, chosen_device, chosen_dtype, name)
    with refused_if_full(name, chosen_dtype, chosen_device):
        make_projections(model, AS_STORED, chosen_device, chosen_dtype, None, {}, family.weight_map)
        fill_random(model, seed)
    return LoadedModel(
        model=model.eval(),
        config=config,
        name=name,
        dtype=chosen_dtype,
        device=chosen_device,
        max_seq_len=context_len,
        eos_ids=(),
    )


@torch.no_grad()
def fill_random(model: Model, seed: int = 0) -> None:
    """Give every parameter a value, where it lies; the same seed gives the same values on one device."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, WIDTH, generator=generator)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0 - module.offset)
        elif isinstance(weight, torch.nn.Parameter) and weight.dim() == 1:  # a LayerNorm
            weight.fill_(1.0)

"""A model of any published shape with random weights: speed needs the shape, not the knowledge.

    config.json ──► the family's network, built on the device ──► filled there with random numbers

Nothing is read from disk or copied from the host, so eight billion parameters are ready in a second. Matrices
are drawn from a normal distribution of standard deviation 0.02, which keeps activations finite; zeros would
run faster than real weights do. Norm weights are one (zero where the family stores them centred on zero), and
biases are small. The model's output is noise; its timing is not.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from infer.errors import ConfigError
from infer.layers.linear import Projected
from infer.layers.norm import RMSNorm
from infer.loader.dtype import settle_products
from infer.loader.formats.hf_config import read_hf_config
from infer.loader.headers import headers_of_config
from infer.loader.load import LoadedModel, check_length, choose_device, loaded_as
from infer.loader.quantization import DENSE, home_of
from infer.loader.slices import ALONE, Rank
from infer.loader.weight_plan import plan_weights, refused_if_full
from infer.models.model import Model

WIDTH = 0.02


def load_random(
    config_dir: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str = "none",
    home: str | None = None,
    max_seq_len: int | None = None,
    seed: int = 0,
    rank: Rank = ALONE,
) -> LoadedModel:
    """Make a random model with the shape in `config_dir/config.json`, without tokenizer and EOS tokens.

    `quantization`, `home` and `rank` as in load.py; there are no stored codes to keep, so auto means none.
    """
    if read_hf_config(config_dir).get("quantization_config"):
        raise ConfigError(
            f"{config_dir / 'config.json'} has a quantization_config, but random weights are plain numbers; "
            "use the config of the checkpoint that is not quantized"
        )
    name = f"{config_dir.resolve().name} (random weights)"
    headers = headers_of_config(config_dir / "config.json", name)
    if headers.family.load is not None:
        raise ConfigError(
            f"{name} runs with transformers' code, which has no random weights; use a checkpoint"
        )
    chosen_device = choose_device(device)
    if quantization in ("auto", DENSE):  # weights as stored, which are dense here
        quantization = DENSE if (home or home_of(chosen_device)) == "cpu" else "auto"
    plan = plan_weights(
        headers, quantization=quantization, dtype=dtype, device=chosen_device, home=home, rank=rank
    )
    plan.check_cuts()
    settle_products(plan.rule.dtype, chosen_device)
    context_len = check_length(max_seq_len, headers.config)
    model = plan.build(context_len)
    with refused_if_full(name, plan.rule.dtype, chosen_device):
        fill_random(model, seed)
    return loaded_as(plan, model, context_len, kept_as=plan.describe())


@dataclass(frozen=True, slots=True)
class RandomMatrix:
    """A random matrix in place of a stored one, for projections that round what they load."""

    shape: tuple[int, ...]
    generator: torch.Generator
    dtype: torch.dtype

    def rows(self, num_rows: int, device: torch.device) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows on the device of the generator, which is the model's device."""
        for first in range(0, self.shape[0], num_rows):
            part = slice(first, min(first + num_rows, self.shape[0]))
            numbers = torch.empty((part.stop - first, self.shape[1]), dtype=self.dtype, device=device)
            yield part, numbers.normal_(0.0, WIDTH, generator=self.generator)

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out` with random numbers."""
        out.normal_(0.0, WIDTH, generator=self.generator)

    def transpose(self) -> None:
        """Return None: no transposed matrix is stored."""
        return


def make_generator(device: torch.device | str, seed: int) -> torch.Generator:
    """Make a random generator; imports what PyTorch 2.13 needs for it, if client/imports.py deferred it."""
    with suppress(ImportError):  # an older PyTorch, which does not need the module
        importlib.import_module("torch._prims.rng_prims")
    return torch.Generator(device).manual_seed(seed)


@torch.no_grad()
def fill_random(model: Model, seed: int = 0) -> None:
    """Fill every parameter in place; the same seed gives the same values on one device."""
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    generator = make_generator(device, seed)
    coded = [m.stored for m in model.modules() if isinstance(m, Projected) and m.stored.scheme != DENSE]
    for projection in coded:
        spec = projection.spec
        for expert in range(spec.num_experts or 1):
            source = RandomMatrix((spec.num_rows, spec.size), generator, spec.dtype)
            projection.load(source, part=None, expert=expert, transposed=False)
    filled = {id(tensor) for projection in coded for tensor in projection.tensors.values()}
    for parameter in model.parameters():
        if id(parameter) not in filled and not parameter.is_meta:
            parameter.normal_(0.0, WIDTH, generator=generator)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0 - module.offset)
        elif isinstance(weight, torch.nn.Parameter) and weight.dim() == 1:  # a LayerNorm
            weight.fill_(1.0)

"""The binder: gives every linear layer of a model the projection it runs with, and prepares them all.

    wait = bind(model, device, deterministic=False)       walks the model once; compilers begin
    wait()                                                compiled kernels are loaded: steps may run

The binder tells each projection its neighbours (`Neighbours`), which determine the kernels that it needs. It
finds them in the model: a block declares its children in the order in which they run. So if a sub-layer, an
RMS norm and another sub-layer follow each other, the last matrix of the first one writes the sum that the
first matrix of the second one reads.

Norms in other places (Gemma's, after a sub-layer) prevent this fusion. A mixture of experts reads the sum
with its router. A wrong guess never gives a wrong result, because fusion is decided when the stream is read
(quant/residual.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from infer.config.backends import REFERENCE
from infer.errors import ConfigError
from infer.kernels.cpu.operations import EXACT_DIGITS, FAST_DIGITS
from infer.kernels.linear.compiled import CompiledLinears
from infer.kernels.linear.invariant import places_are_alike
from infer.kernels.runtime.communicator import Communicator
from infer.kernels.runtime.dispatch import device_kind
from infer.layers.adapted import AdapterBank
from infer.layers.linear import Linear, Projected
from infer.layers.mlp import MLP, GatedMLP
from infer.layers.moe import MixtureOfExperts
from infer.layers.norm import RMSNorm
from infer.layers.parallel import join_ranks
from infer.quant.dense import InvariantDense
from infer.quant.packed import Packed
from infer.quant.projection import Neighbours
from infer.quant.reference import Reference


def bind(
    model: nn.Module,
    device: torch.device,
    *,
    deterministic: bool,
    mlp_backend: str = "kernels",
    cpu_products: str = "exact",
    communicator: Communicator | None = None,
    vocab_size: int = 0,
    adapters: AdapterBank | None = None,
) -> Callable[[], bool]:
    """Choose and prepare the projection of every layer; call the result before the first step.

    The result waits for the kernels, and returns True if all expected ones could be loaded. A model has its
    blocks in `layers`, in order, and the LM head in `head`. With a `communicator` the model is one rank's
    part, and all ranks together have `vocab_size` logits. `adapters` are wrapped around the projections.
    """
    modules = dict(model.named_modules())
    layers = {name: module for name, module in modules.items() if isinstance(module, Projected)}
    compiled = CompiledLinears(device)
    digits = FAST_DIGITS if cpu_products == "fast" else EXACT_DIGITS
    for layer in layers.values():
        if isinstance(layer.stored, Packed):
            layer.stored.use_digits(digits)
        chosen = layer.stored.invariant() if deterministic else layer.stored
        if chosen is None:
            raise ConfigError(
                f"deterministic cannot be used with quantization={layer.stored.scheme}, whose results depend "
                "on the other rows of the batch; choose another quantization"
            )
        layer.projection = chosen
    if mlp_backend == REFERENCE:
        _use_references(modules.values())
    if deterministic:
        _check_places(layers)
    if adapters is not None:  # before ranks are joined, because their sums include the low-rank products
        adapters.wrap(model)
    if communicator is not None:
        join_ranks(model, communicator, vocab_size)
    ask_for_kernels(model, compiled, is_alone=communicator is None)
    if not compiled.is_wanted:
        return lambda: True
    pool = ThreadPoolExecutor(1, "compile-linears")
    compiling = pool.submit(compiled.compiler())
    pool.shutdown(wait=False)

    def wait() -> bool:
        compiling.result()
        return compiled.load()

    return wait


def ask_for_kernels(model: nn.Module, compiled: CompiledLinears, *, is_alone: bool) -> dict[str, Neighbours]:
    """Let every projection request the kernels in CUDA C++ that it could use; returns all neighbours.

    `is_alone`: False for one rank's part of a model, whose experts have no kernels for few tokens.
    """
    modules = dict(model.named_modules())
    writers, readers = find_neighbours(modules["layers"])
    gates = {module.gate_up: module.activation for module in modules.values() if isinstance(module, GatedMLP)}
    asked: dict[str, Neighbours] = {}
    for name, layer in modules.items():
        if isinstance(layer, Projected):
            activation = gates.get(layer, "") if isinstance(layer, Linear) else ""
            asked[name] = Neighbours(layer in readers, layer in writers, activation, layer is modules["head"])
            layer.projection.prepare(compiled, asked[name])
        elif isinstance(layer, MixtureOfExperts) and is_alone:
            layer.prepare(compiled)
    return asked


def _use_references(modules: Iterable[nn.Module]) -> None:
    """Give every feed-forward layer the reference projection of its scheme."""
    halves = [module for module in modules if isinstance(module, GatedMLP | MLP | MixtureOfExperts)]
    for layer in (child for half in halves for child in half.children()):
        if isinstance(layer, Projected):
            if not layer.stored.can_dequantize:
                raise ConfigError(
                    f"mlp_backend={REFERENCE} cannot be used with quantization={layer.stored.scheme}, which "
                    "cannot unpack its weights; leave mlp_backend out"
                )
            layer.projection = Reference(layer.stored)


def find_neighbours(blocks: nn.Module) -> tuple[set[Projected], set[Projected]]:
    """The matrices that write sums into the residual stream, and the matrices that read them."""
    children = [child for block in blocks.children() for child in block.children()]
    writers: set[Projected] = set()
    readers: set[Projected] = set()
    for before, norm, after in zip(children, children[1:], children[2:], strict=False):
        first, last = _matrices(before), _matrices(after)
        if isinstance(norm, RMSNorm) and first and last:
            if not isinstance(before, MixtureOfExperts):  # expert sums have their own kernels (moe/few.py)
                writers.add(first[-1])
            readers.add(last[0])
    return writers, readers


def _matrices(sublayer: nn.Module) -> list[Linear]:
    """The matrices of a sub-layer in order; in a mixture of experts, only the shared ones."""
    return [module for module in sublayer.modules() if isinstance(module, Linear)]


def _check_places(layers: dict[str, Projected]) -> None:
    """Refuse a CPU whose matrix library computes other bits for a row at another place in the batch."""
    tried: set[torch.Size] = set()
    for name, layer in layers.items():
        if not isinstance(layer.projection, InvariantDense):
            continue
        weight = layer.projection.weight
        w_NK = weight[0] if weight.dim() > 2 else weight
        if device_kind(weight.device) != "cpu" or w_NK.shape in tried:
            continue
        tried.add(w_NK.shape)
        if not places_are_alike(w_NK):
            raise ConfigError(
                "deterministic cannot be used here: the machine's matrix library adds up the rows of a batch "
                f"in different orders ({name}, {tuple(w_NK.shape)}); use quantization=int8, which needs none"
            )

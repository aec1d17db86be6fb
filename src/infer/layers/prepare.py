"""What the matrices of a model need before its first step: kernels that are compiled for them.

Triton compiles when a kernel is first launched, which is when steps are captured, before anyone waits. The
linears in CUDA C++ take seconds, for all matrices of a model and all at once or not at all
(kernels/linear/prepared.py), so they are compiled while the engine is built, beside the rest of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from infer.kernels.linear.pdl import AHEAD
from infer.kernels.linear.prepared import Matrix, PreparedLinears
from infer.kernels.linear.wgmma import WGMMA, WGMMA_MORE
from infer.layers.linear import Linear
from infer.layers.mlp import GatedMLP
from infer.layers.moe import MixtureOfExperts
from infer.quant.dense import DENSE

_WRITERS = ("out", "down")  # names of the matrices that write into the residual stream; the others read it


def prepare_linears(layers: Iterable[nn.Module], head: Linear, device: torch.device) -> Callable[[], None]:
    """Begin to compile what few tokens are multiplied with, where Triton's kernels are slower.

    Call the result to wait for it and to load it: until then no step may run.
    """
    matrices = matrices_of(layers) if device.type == "cuda" else []
    if not matrices:
        return lambda: None
    to_logits = Matrix(*head.weight.shape)
    has_head = _is_plain(head) and WGMMA.choose(WGMMA.tokens[-1], to_logits) is not None
    wanted: list[tuple[PreparedLinears[Any], list[Matrix]]] = [
        (AHEAD, matrices),
        (WGMMA, [*matrices, to_logits] if has_head else matrices),
        (WGMMA_MORE, [matrix for matrix in matrices if matrix.activation or matrix.writes]),
    ]
    pool = ThreadPoolExecutor(1, "compile-linears")
    compiled = [pool.submit(kernels.compile, some, device) for kernels, some in wanted]
    pool.shutdown(wait=False)

    def load() -> None:
        for is_compiled, (kernels, some) in zip(compiled, wanted, strict=True):
            is_compiled.result()
            kernels.prepare(some, device)

    return load


def matrices_of(layers: Iterable[nn.Module]) -> list[Matrix]:
    """All matrices of a model's layers, each kind once; none if one is not plain bfloat16, or has experts."""
    found: dict[Matrix, None] = {}
    for block in layers:
        adds = getattr(block, "reader", None) is not None  # its matrices add to the stream themselves
        gates: dict[Linear, str] = {}
        for name, module in block.named_modules():
            if isinstance(module, MixtureOfExperts):
                return []
            if isinstance(module, GatedMLP) and module.gate_up.bias is None:
                gates[module.gate_up] = module.activation
            if not isinstance(module, Linear):
                continue
            if not _is_plain(module):
                return []
            (N, K), activation = module.weight.shape, gates.get(module, "")
            writes = name.rpartition(".")[2] in _WRITERS
            matrix = Matrix(
                N // 2 if activation else N, K, activation, module.bias is not None,
                reads=adds and not writes, writes=adds and writes,
            )  # fmt: skip
            found[matrix] = None
    return list(found)


def _is_plain(matrix: Linear) -> bool:
    return matrix.scheme is DENSE and matrix.weight.dtype == torch.bfloat16

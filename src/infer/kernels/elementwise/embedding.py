"""Embedding lookup, and scaling and addition of rows.

    embed    x_t = table[id_t]
    scaled   y = x * factor          for Gemma, whose embeddings are stored too small; for Granite's branches
    added    y = x + residual        if no norm directly reads the sum (OLMo)

The table may have fewer bits than the rows that are returned: the 16-bit embedding of a float32 model is
converted row by row, and never exists in float32 as a whole.

Shapes:  T tokens, V rows, D numbers each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infer.kernels.cpu import operations
from infer.kernels.cpu.library import library
from infer.kernels.runtime.dispatch import on_cpu, use_c


def embed_reference(ids_T: torch.Tensor, table_VD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The specification of `embed`, and its path on a GPU."""
    return F.embedding(ids_T, table_VD).to(dtype)


def embed(ids_T: torch.Tensor, table_VD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Look up rows and return them as `dtype`, [T, D]."""
    c = library() if on_cpu(table_VD) and dtype is torch.float32 else None
    is_plain = ids_T.dim() == 1 and ids_T.dtype is torch.int64 and table_VD.is_contiguous()
    if c is not None and is_plain and table_VD.dtype in operations.EMBEDDING_KINDS:
        (num_rows, size), kind = table_VD.shape, operations.EMBEDDING_KINDS[table_VD.dtype]
        return operations.embed(c, ids_T, table_VD, None, num_rows=num_rows, size=size, kind=kind)
    return embed_reference(ids_T, table_VD, dtype)


def scaled_reference(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """The specification of `scaled`, and its path on a GPU."""
    return x_TD * factor


def scaled(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply every element by `factor`, which the dtype of `x_TD` can represent."""
    if x_TD.dim() == 2 and (c := use_c(x_TD)):
        return operations.scale(c, x_TD, factor)
    return scaled_reference(x_TD, factor)


def added_reference(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
    """The specification of `added`, and its path on a GPU."""
    return x_TD + residual_TD


def added(x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
    """Add two tensors of equal shape, in C for float32 on a CPU (kernels/cpu/program.py), else in PyTorch."""
    if x_TD.dim() == 2 and (c := use_c(x_TD)) and use_c(residual_TD):
        return operations.scale(c, x_TD, 1.0, residual_TD)
    return added_reference(x_TD, residual_TD)

"""The gate of a gated MLP: SwiGLU and GeGLU.

    y = act(gate) * up          [gate | up] is one row of 2F, the output of the fused projection

    silu        x * sigmoid(x)                                              Llama, Mistral, Qwen
    gelu_tanh   x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))           Gemma, GPT-2 (ungated)
    gelu        x/2 * (1 + erf(x / sqrt(2)))

and one gate of a different form:

    clamped     (up + 1) * gate * sigmoid(1.702 gate)        gpt-oss; gate <= 7, -7 <= up <= 7

Computed in float32; act(gate) is rounded to the input type before it is multiplied, as if the two
operations were separate.

Memory-bound: 2F elements read and F written per token, in one launch, without act(gate) in memory.

Shapes:  T tokens, F intermediate size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from infer.errors import ConfigError, closest
from infer.kernels.cpu import operations
from infer.kernels.runtime.dispatch import jit, launch_options, tl, use_c, use_triton
from infer.kernels.runtime.launch import launch_triton

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}

CLAMPED, CLAMPED_ALPHA, CLAMPED_LIMIT = "clamped", 1.702, 7.0

_BLOCK_F = 1024  # columns per program: 8 per thread of 4 warps


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of `ACTIVATIONS` to every element, without a gate, for GPT-2."""
    if activation in ACTIVATIONS and x.dim() == 2 and (c := use_c(x)):
        return operations.activation(c, x, activation)
    return find_activation(activation)(x)


def find_activation(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The PyTorch function of that name; raises ConfigError with the known names."""
    if activation not in ACTIVATIONS:
        hint = closest(activation, ACTIVATIONS)
        raise ConfigError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}{hint}")
    return ACTIVATIONS[activation]


def check_gate(activation: str) -> None:
    """Raise ConfigError unless there is a gate of that name."""
    if activation != CLAMPED:
        find_activation(activation)


def gated_activation_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """The specification of the kernel, which also runs on the CPU."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == CLAMPED:
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * CLAMPED_ALPHA))
    return find_activation(activation)(gate) * up


@jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply one of `ACTIVATIONS` to every element, in the epilogue of any kernel."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2u); 1.5957691216 is 2 sqrt(2/pi)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)


@jit
def clamped_gate(gate, up):
    """Apply the gate of gpt-oss, in the epilogue of any kernel."""
    gate, up = tl.minimum(gate, 7.0), tl.minimum(tl.maximum(up, -7.0), 7.0)
    return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)


@jit
def _gated_activation_kernel(
    gate_up_ptr, y_ptr, gate_up_row_stride, F, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # int64: T * 2F may pass 2^31
    cols = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    in_row = cols < F
    if PDL:  # see dispatch.py
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    gate_ptrs = gate_up_ptr + row * gate_up_row_stride + cols
    gate = tl.load(gate_ptrs, mask=in_row, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + F, mask=in_row, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped":
        gated = clamped_gate(gate, up)
    else:
        gated = activated(gate, ACTIVATION).to(y_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(y_ptr + row * F + cols, gated.to(y_ptr.dtype.element_ty), mask=in_row)


def gated_activation(gate_up: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Turn [T, 2F] into [T, F]: the activated first half times the second half."""
    if not use_triton(gate_up):
        if (c := use_c(gate_up)) and activation in ACTIVATIONS and gate_up.dim() == 2:
            return operations.activation(c, gate_up, activation, is_gated=True)
        return gated_activation_reference(gate_up, activation)
    check_gate(activation)
    assert gate_up.stride(1) == 1, f"columns must be contiguous, got strides {gate_up.stride()}"
    T, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
    y_TF = torch.empty((T, intermediate_size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (T, -(-intermediate_size // _BLOCK_F))
    launch_triton(
        _gated_activation_kernel, grid, (gate_up, y_TF), (gate_up.stride(0), intermediate_size),
        ACTIVATION=activation, BLOCK_F=_BLOCK_F, **launch_options(gate_up.device),
    )  # fmt: skip
    return y_TF

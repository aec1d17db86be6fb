"""The roofline: the shortest possible time on this machine, to compare measured times with.

A step reads every weight once and multiplies it with every token; whichever takes longer is its roofline.
Layers, head and attention run one after the other, so their rooflines add up:

    decode(batch, context) = max(W_layers / BW, 2 P_layers * batch / F)      weights of the layers
                           + max(W_head / BW, 2 P_head * batch / F)          weights of the head
                           + batch * context * kv / BW                       keys and values, once each
    prefill(length)        = (2 (P_layers - P_last) * length + 4 N H (L - 1) * length (length + 1) / 2
                              + 2 P_last + 4 N H * length                    last layer of the last token
                              + 2 P_head) / F
                             and not less than reading the weights once

P parameters, W their bytes, kv bytes of keys and values per token, N query heads of size H in L layers.
A layer with E experts, C of them for each token, reads the experts that its tokens choose. If tokens choose
uniformly and independently, it reads  E (1 - (1 - C / E) ^ batch)  experts on average.
P_last are the parameters of the last layer without its keys and values. Only the last token of a prompt is
sampled from. For the others, only the last layer's keys and values are needed, not its queries, attention and
MLP. (The engine saves less: it computes attention there for all tokens, models/model.py.)
BW (bytes copied per second, reads plus writes) and F (operations per second of a large matrix product, two
per multiply-add) are measured in the same process as the times compared with them, because the ceilings of a
data sheet are not this machine's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from infer.kernels.runtime.dispatch import is_gpu, synchronize
from infer.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The measured peak rates of this machine."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def figures(self, roofline: float, seconds: float) -> dict[str, float]:
        """Return a roofline, the share of it that was reached, and the ceilings it was computed from."""
        return {
            "roofline_s": roofline,
            "roofline_share": roofline / seconds,
            "copy_gb_per_s": self.copy_bytes_per_s / 1e9,
            "matmul_tflops": self.matmul_flops_per_s / 1e12,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that a roofline depends on, in elements unless the name says bytes."""

    layer_params: int  # parameters of the matrices; norms and biases are too small to count
    last_params: int  # parameters of the last layer without keys and values; only sampled rows need them
    head_params: int
    attention_size: int  # query heads * head size, in one layer
    num_layers: int
    kv_elements: int  # keys and values of one token in all layers
    expert_params: int = 0  # part of `layer_params` in the experts of one token
    expert_share: float = 1.0  # C / E, the share of a layer's experts that a token is routed to
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def layer_params_read(self, batch: int) -> float:
        """The parameters of the layers that a step of `batch` tokens reads, each once."""
        times = (1 - (1 - self.expert_share) ** batch) / self.expert_share
        return self.layer_params + (times - 1) * self.expert_params


def shape_of(config: ModelConfig, *, weight_bytes: float, kv_bytes: float) -> ModelShape:
    """Return the shape of a model from its config alone."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    experts = config.experts
    sparse = [config.mlp_size(n) for n in range(config.num_layers) if config.experts_of(n) is not None]
    return ModelShape(
        layer_params=config.all_layer_weights,
        last_params=config.layer_weights(config.num_layers - 1) - 2 * kv * config.hidden_size,
        head_params=config.vocab_size * config.hidden_size,
        attention_size=query,
        num_layers=config.num_layers,
        kv_elements=2 * kv * config.num_layers,
        expert_params=(3 if config.gated_mlp else 2) * config.hidden_size * sum(sparse),
        expert_share=1.0 if experts is None else experts.num_choices / experts.num_experts,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


def weights_roofline(shape: ModelShape, ceilings: Ceilings, batch: int) -> float:
    """Return the seconds of a decode step with `batch` sequences, without attention."""
    bandwidth, flops = ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
    layers_read, head = shape.layer_params_read(batch), shape.head_params
    return sum(
        max(read * shape.weight_bytes / bandwidth, 2 * multiplied * batch / flops)
        for read, multiplied in ((layers_read, shape.layer_params), (head, head))
    )


def decode_roofline(shape: ModelShape, ceilings: Ceilings, *, batch: int, context: float) -> float:
    """Return the seconds of one decode step with a context of `context` tokens for each sequence."""
    kv = batch * context * shape.kv_elements * shape.kv_bytes
    return weights_roofline(shape, ceilings, batch) + kv / ceilings.copy_bytes_per_s


def prefill_flops(shape: ModelShape, length: int) -> float:
    """Return the operations of one prompt; most of the last layer, and the head, only for its last token."""
    rows = 2 * (shape.layer_params - shape.last_params) * length + 2 * (shape.last_params + shape.head_params)
    num_pairs = (shape.num_layers - 1) * length * (length + 1) / 2 + length  # pairs of a query and a key
    return rows + 4 * shape.attention_size * num_pairs


def prefill_roofline(shape: ModelShape, ceilings: Ceilings, length: int) -> float:
    """Return the seconds to the first token of one prompt on an idle machine."""
    return max(
        prefill_flops(shape, length) / ceilings.matmul_flops_per_s, weights_roofline(shape, ceilings, 1)
    )


def workload_roofline(shape: ModelShape, ceilings: Ceilings, lengths: Sequence[tuple[int, int]]) -> float:
    """Return the seconds for (prompt, output) lengths that arrive together, with steps as full as possible.

    The prompts take the time of their operations, which makes the first token of every request. Each further
    step reads the weights once for all running requests. Keys and values are read once per generated token.
    """
    seconds = sum(prefill_flops(shape, prompt) for prompt, _ in lengths) / ceilings.matmul_flops_per_s
    ends = sorted(output for _, output in lengths)
    for step in range(2, ends[-1] + 1):
        batch = len(ends) - bisect_left(ends, step)
        seconds += weights_roofline(shape, ceilings, batch)
    num_read = sum(sum(range(prompt + 1, prompt + output)) for prompt, output in lengths)
    return seconds + num_read * shape.kv_elements * shape.kv_bytes / ceilings.copy_bytes_per_s


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, scale: float = 1.0) -> Ceilings:
    """Return the best of several copies of a large tensor and of several large matrix products."""
    size = int(scale * (8192 if is_gpu(device) else 1024))
    copied = copy_bandwidth(device, scale=scale)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    matmul_s = best_seconds(lambda: a @ b, device)
    return Ceilings(copy_bytes_per_s=copied, matmul_flops_per_s=2 * size**3 / matmul_s)


def copy_bandwidth(device: torch.device, *, scale: float = 1.0) -> float:
    """Return the bytes per second, reads plus writes, of the best copy of a large tensor in 0.3 s."""
    num_pieces = int(scale * (1 << (14 if is_gpu(device) else 11)))
    source = torch.randint(0, 255, (1 << 16,), dtype=torch.uint8, device=device).repeat(num_pieces)
    target = torch.empty_like(source)
    return 2 * len(source) / best_seconds(lambda: target.copy_(source), device, seconds=0.3)


def best_seconds(work: object, device: torch.device, tries: int = 7, seconds: float = 0.0) -> float:
    """Return the shortest time of `tries` calls, or more in `seconds`, because disturbances add time."""
    assert callable(work)
    work()
    synchronize(device)
    best, end = float("inf"), perf_counter() + seconds
    while tries > 0 or perf_counter() < end:
        tries -= 1
        start = perf_counter()
        work()
        synchronize(device)
        best = min(best, perf_counter() - start)
    return best

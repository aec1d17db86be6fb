"""Attention of long fresh prompts by cuDNN, which supports neither block tables nor ragged lengths.

cuDNN's fused attention is faster than our kernel for long prompts, but it takes only batches of equal length,
and it needs a plan for each shape, which takes about 60 milliseconds to build. So there are few shapes, their
plans are built before a server is ready (`prepare`), and a shape without a plan is not used:

    chunks of a step   4096, 4096           ->   one batch 2 x 4096, without a copy
                       3000                 ->   1 x 3072, padded
                       3000 after a prefix  ->   not fresh: our own kernel
                       700                  ->   short: our own kernel

Padding comes after the tokens of a prompt, and causal attention looks back, so no token sees any padding; the
outputs of the padding are discarded. If enough tokens follow in the step, their queries and keys serve as
padding, without a copy. Values are copied: masked positions are still multiplied, zero times NaN is NaN, and
the prompt that follows belongs to another request. In this case, and at the end of a step, the prompt is
copied and padded with copies of its last token.

Shapes:  T tokens, N query heads, G kv heads, H head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from infer.config.profiles.profile import AttentionProfile
from infer.kernels.attention.choice import least_for_cudnn
from infer.kernels.attention.prefill import PrefillChunk
from infer.kernels.runtime.choice import Declined
from infer.kernels.runtime.profiles import device_profile

logger = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Shape(NamedTuple):
    """The shape of a batch: the number of prompts, and tokens per prompt."""

    num: int
    length: int


class Batch(NamedTuple):
    """Adjacent prompts of equal length; a single prompt may be shorter than its shape."""

    first: int  # index of its first token in the step
    num_tokens: int  # length of each prompt
    shape: Shape


def dense_shapes(profile: AttentionProfile, least: int, max_tokens: int, max_len: int) -> Iterator[Shape]:
    """The shapes that get plans, shapes of one prompt first; no prompt is longer than `max_len`."""
    lengths, length, pad_len = [], least, profile.cudnn_pad_len
    while length <= min(max_tokens, padded_len(max_len, pad_len)):
        lengths.append(length)
        length = padded_len(length + 1, pad_len)
    yield from (Shape(1, length) for length in lengths)
    powers = [length for length in lengths if length & (length - 1) == 0]
    for num in profile.cudnn_batches[:-1]:
        yield from (Shape(num, length) for length in powers if num * length <= max_tokens)


def padded_len(num_tokens: int, pad_len: int) -> int:
    """The length of the shape for a prompt; the steps between lengths grow with the length."""
    step = pad_len
    while num_tokens > 16 * step:
        step *= 2
    return -(-num_tokens // step) * step


class DenseAttention:
    """Attention of long fresh prompts by cuDNN, with the plans for one kind of heads on one device."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, dtype: torch.dtype,
        device: torch.device, max_tokens: int, max_len: int, attend: Attend | None = None,
        profile: AttentionProfile | None = None,
    ) -> None:  # fmt: skip
        self._profile = profile = profile or device_profile(device).attention
        self._heads, self._scale = (num_heads, num_kv_heads, head_dim), scale
        self._dtype, self._device, self._call = dtype, device, attend or attend_by_cudnn
        self._wanted: list[Shape] = []
        least = least_for_cudnn(profile, num_heads, head_dim, dtype)
        if not isinstance(least, Declined):
            self._wanted = list(dense_shapes(profile, least, max_tokens, max_len))
        self._wanted.reverse()
        self.ready: set[Shape] = set()

    def prepare_longest(self) -> int:
        """Build the plan for the longest prompt; returns its tokens, or 0 if cuDNN is not used."""
        self._wanted.sort(key=lambda shape: (shape.num == 1, shape.length))
        length = self._wanted[-1].length if self._wanted else 0
        return length if self.prepare() else 0

    def prepare(self) -> bool:
        """Build one more plan; returns False if none is left to build."""
        if not self._wanted:
            return False
        shape = self._wanted.pop()
        num_heads, num_kv_heads, head_dim = self._heads
        num_tokens = shape.num * shape.length
        try:
            q, k, v = (  # zeros, because another thread may be capturing steps, which owns the generator
                torch.zeros(num_tokens, heads, head_dim, dtype=self._dtype, device=self._device)
                for heads in (num_heads, num_kv_heads, num_kv_heads)
            )
            self._attend(q, k, v, shape)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:  # unsupported by this build or GPU, or out of memory
            logger.info("cuDNN computes only prompts of %s: %s", self.ready, str(error).splitlines()[0])
            self._wanted = []
            return False
        self.ready.add(shape)
        return True

    def split(self, chunks: Sequence[PrefillChunk]) -> tuple[list[Batch], list[PrefillChunk]]:
        """Split chunks into batches for cuDNN and the rest, for the prefill kernel."""
        batches: list[Batch] = []
        rest: list[PrefillChunk] = []
        index = 0
        while index < len(chunks):
            batch = self._batch_at(chunks, index) if self.ready else None
            if batch is None:
                rest.append(chunks[index])
                index += 1
            else:
                batches.append(batch)
                index += batch.shape.num
        return batches, rest

    def _batch_at(self, chunks: Sequence[PrefillChunk], index: int) -> Batch | None:
        """The largest batch that begins with this chunk."""
        first, num_tokens, _, start = chunks[index]
        if start != 0:
            return None
        for num in self._profile.cudnn_batches:
            shape = Shape(num, padded_len(num_tokens, self._profile.cudnn_pad_len))
            run = chunks[index : index + num]
            lie_so = all(
                (chunk.first, chunk.num, chunk.start) == (first + place * num_tokens, num_tokens, 0)
                for place, chunk in enumerate(run)
            )
            is_whole = num == 1 or num_tokens == shape.length
            if shape in self.ready and len(run) == num and lie_so and is_whole:
                return Batch(first, num_tokens, shape)
        return None

    def attend(
        self, q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor, batches: Sequence[Batch], *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend with the tokens of these batches; returns `out`, or a new tensor with all tokens.

        Without `out`, the step must have no other tokens.
        """
        for first, num_tokens, shape in batches:
            end = first + shape.num * num_tokens
            is_whole_step = (first, end) == (0, q_TNH.shape[0])
            q, k = (_padded(x, first, end, shape, borrows=True) for x in (q_TNH, k_TGH))
            # V is a view of the projection, and the plans of `prepare` are for contiguous tensors
            v = _padded(v_TGH, first, end, shape, borrows=False).contiguous()
            result = self._attend(q, k, v, shape)[: end - first]
            if is_whole_step:
                return result
            if out is None:
                out = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
            out[first:end] = result
        assert out is not None, "neither batches nor anything else"
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Attend with a whole batch; returns [num * length, heads, H], like the queries."""
        batched = [x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
        result = self._call(batched[0], batched[1], batched[2], self._scale).transpose(1, 2)
        return result.reshape(q.shape)


def attend_by_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention [B, heads, S, H] by cuDNN; sdpa_kernel() would set flags of the whole process."""
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, True, False, scale=scale
    )[0]
    return result


def _padded(x: torch.Tensor, first: int, end: int, shape: Shape, *, borrows: bool) -> torch.Tensor:
    """The tokens of a batch, padded to its shape with the tokens that follow or copies of the last one."""
    num_tokens = shape.num * shape.length
    if first == 0 and num_tokens == x.shape[0]:
        return x
    if first + num_tokens <= x.shape[0] and (borrows or end == first + num_tokens):
        return x[first : first + num_tokens]
    own = x[first:end]
    return torch.cat((own, own[-1:].expand(num_tokens - len(own), -1, -1)))

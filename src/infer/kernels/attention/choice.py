"""The choice of the attention kernel, for decoding rows and for chunks of prompts.

    decoding rows        from the projection on, or after heads.py has written the cache; CUDA C++ or Triton
    chunks of prompts    cuDNN for long fresh chunks, PyTorch's FlashAttention if requested, or Triton

The device profile says where one kernel is faster than another; the lists give the order of the attempts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from infer.config.backends import REFERENCE
from infer.config.profiles.profile import AttentionProfile
from infer.kernels.runtime.choice import Declined, Way


class DecodeProblem(NamedTuple):
    """The decoding rows of a step, and the facts about their heads."""

    num_rows: int
    num_kv_heads: int
    head_dim: int
    backend: str  # resolved `decode_attention_backend`
    profile: AttentionProfile
    has_codes: bool = False  # True: keys and values are stored in 8 bits
    decodes_only: bool = True  # True: no prompt tokens, and no token of the step sees another
    no_cuda: str = ""  # reason why `auto` cannot use CUDA C++ here

    @property
    def heads(self) -> int:
        """The number of kv heads in all rows: the work items before any row is split."""
        return self.num_rows * self.num_kv_heads


class DecodeLaunch(NamedTuple):
    """The chosen kernel for decoding rows."""

    by: str  # cuda, triton, or torch (the specification)
    is_projected: bool = False  # True: starts from the projection and writes keys and values itself


def _covers_reference(problem: DecodeProblem) -> DecodeLaunch | Declined:
    return DecodeLaunch("torch") if problem.backend == REFERENCE else Declined("only for backend torch_ref")


def _why_not_projected(problem: DecodeProblem) -> str:
    most = problem.profile.projected_heads
    if not problem.decodes_only:
        return "only for steps in which every token decodes"
    return f"only for up to {most} kv heads of all rows" if problem.heads > most else ""


def _covers_projected_cuda(problem: DecodeProblem) -> DecodeLaunch | Declined:
    if why := _why_not_projected(problem):
        return Declined(why)
    most = problem.profile.cuda_projected_heads.get(problem.head_dim, 0)
    if problem.backend == "auto" and not problem.has_codes and problem.heads > most:
        return Declined(f"only for up to {most} kv heads of all rows, with heads of {problem.head_dim}")
    return _by_cuda(problem, DecodeLaunch("cuda", is_projected=True))


def _covers_projected(problem: DecodeProblem) -> DecodeLaunch | Declined:
    why = _why_not_projected(problem)
    return Declined(why) if why else DecodeLaunch("triton", is_projected=True)


def _covers_cuda(problem: DecodeProblem) -> DecodeLaunch | Declined:
    most = problem.profile.projected_heads
    if problem.backend == "auto" and not problem.has_codes and problem.heads <= most:
        return Declined(f"only for more than {most} kv heads of all rows")
    return _by_cuda(problem, DecodeLaunch("cuda"))


def _by_cuda(problem: DecodeProblem, launch: DecodeLaunch) -> DecodeLaunch | Declined:
    if problem.backend not in ("auto", "cuda"):
        return Declined(problem.no_cuda or f"the backend is {problem.backend}")
    return launch


DECODE_WAYS: tuple[Way[DecodeProblem, DecodeLaunch], ...] = (
    Way("PyTorch, one row after the other", _covers_reference),
    Way("CUDA C++, decode_projected.cu", _covers_projected_cuda),
    Way("Triton, from the projection on", _covers_projected),
    Way("CUDA C++, decode_attention.cu", _covers_cuda),
    Way("Triton, after rotation and write", lambda problem: DecodeLaunch("triton")),
)


class PromptProblem(NamedTuple):
    """A chunk of a prompt, and the facts about the model's heads."""

    num_tokens: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    backend: str  # resolved `attention_backend`
    profile: AttentionProfile
    is_fresh: bool = True  # True: starts its sequence, so nothing of it is cached
    no_cudnn: str = ""  # reason why cuDNN does not support the layers of the model


def least_for_cudnn(
    profile: AttentionProfile, num_heads: int, head_dim: int, dtype: torch.dtype
) -> int | Declined:
    """The shortest prompt, in tokens, for which cuDNN is faster."""
    if dtype.itemsize != 2 or head_dim not in profile.cudnn_min_lens:
        sizes = ", ".join(map(str, profile.cudnn_min_lens)) or "none on this GPU"
        return Declined(f"only for heads of 16-bit numbers of these sizes: {sizes}")
    least = profile.cudnn_min_lens[head_dim]
    is_few = num_heads <= profile.cudnn_few_heads
    return profile.cudnn_few_heads_min_lens.get(head_dim, least) if is_few else least


def _covers_cudnn(problem: PromptProblem) -> str | Declined:
    num_tokens, num_heads, head_dim, dtype, backend, profile, is_fresh, no_cudnn = problem
    if backend != "auto" or not is_fresh:
        return Declined("only for backend auto and prompts without a cached part")
    if no_cudnn:
        return Declined(no_cudnn)
    least = least_for_cudnn(profile, num_heads, head_dim, dtype)
    if isinstance(least, Declined):
        return least
    return "cudnn" if num_tokens >= least else Declined(f"only for {least:,} tokens and more")


def _covers_flash(problem: PromptProblem) -> str | Declined:
    if problem.backend != "flash" or not problem.is_fresh:
        return Declined("only for backend flash and prompts without a cached part")
    return "flash"


PROMPT_WAYS: tuple[Way[PromptProblem, str], ...] = (
    Way("cuDNN", _covers_cudnn),
    Way("PyTorch, FlashAttention", _covers_flash),
    Way("Triton, prefill kernel", lambda problem: "triton"),
)

"""The choice of the kernels that multiply the rows of a mixture's experts."""

from __future__ import annotations

from typing import NamedTuple

from infer.kernels.moe.coded_cuda import MAX_ROWS, GroupedLinear
from infer.kernels.moe.few import FewExperts
from infer.kernels.moe.many import MIN_ROWS, ManyRows
from infer.kernels.runtime.choice import Declined, Way


class ExpertsProblem(NamedTuple):
    """The tokens of a step and the experts of a layer, with the kernels compiled for them."""

    num_tokens: int
    num_choices: int
    num_experts: int
    is_coded: bool
    has_bias: bool = False
    invariant: bool = False  # True: a row's bits must not depend on other rows
    has_bands: bool = True  # True (coded weights): both matrices have whole bands of rows
    few: FewExperts | None = None
    grouped: tuple[GroupedLinear | None, GroupedLinear | None] = (None, None)  # gate and up; down
    many: tuple[ManyRows | None, ManyRows | None] = (None, None)


def _covers_few(problem: ExpertsProblem) -> str | Declined:
    if problem.few is None or not problem.few.num_ready:
        return Declined("needs a full Hopper GPU, bfloat16, no bias, no shared expert and supported sizes")
    last = problem.few.tokens[-1]
    return "few" if problem.few.is_for(problem.num_tokens) else Declined(f"only for up to {last} tokens")


def _why_not_coded(problem: ExpertsProblem) -> str:
    """The reason why coded kernels that depend on the batch do not support a problem; "" if they do."""
    if not problem.is_coded or problem.has_bias or problem.invariant:
        return "only for coded weights without a bias, unless rows must be independent of each other"
    return ""


def _covers_many(problem: ExpertsProblem) -> str | Declined:
    if problem.invariant or problem.has_bias:
        return Declined("only without a bias, unless rows must be independent of each other")
    if problem.is_coded and isinstance(unpacked := _covers_unpacked(problem), Declined):
        return unpacked
    is_many = problem.num_tokens * problem.num_choices >= MIN_ROWS * problem.num_experts
    if not is_many or not all(kernel is not None and kernel.num_ready for kernel in problem.many):
        what = f"{MIN_ROWS} rows per expert and supported sizes"
        return Declined(f"needs a full Hopper GPU, bfloat16, {what}")
    return "many"


def _covers_unpacked(problem: ExpertsProblem) -> str | Declined:
    if why := _why_not_coded(problem):
        return Declined(why)
    is_many = problem.num_tokens * problem.num_choices > MAX_ROWS * problem.num_experts
    if not is_many or not problem.has_bands:
        return Declined(f"only for more than {MAX_ROWS} rows per expert, and matrices of whole bands")
    return "unpacked"


def _covers_grouped(problem: ExpertsProblem) -> str | Declined:
    if why := _why_not_coded(problem):
        return Declined(why)
    if not all(kernel is not None and kernel.num_ready for kernel in problem.grouped):
        return Declined("needs a full Hopper GPU, bfloat16 and supported sizes")
    return "cuda"


def _covers_tiles(problem: ExpertsProblem) -> str | Declined:
    return "tiles" if problem.is_coded else Declined("only for coded weights")


EXPERT_WAYS: tuple[Way[ExpertsProblem, str], ...] = (
    Way("CUDA C++, each token by itself (pdl.cu)", _covers_few),
    Way("CUDA C++, many rows (grouped.cu)", _covers_many),
    Way("Triton, grouped, after unpacking", _covers_unpacked),
    Way("CUDA C++, grouped (pdl.cu)", _covers_grouped),
    Way("Triton, grouped, unpacked tile by tile", _covers_tiles),
    Way("Triton, grouped", lambda problem: "plain"),
)

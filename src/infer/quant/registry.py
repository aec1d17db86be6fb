"""Every way to keep weights: one row each (docs/adding-a-scheme.md)."""

from __future__ import annotations

from collections.abc import Callable

from infer.quant.dense import Dense
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.packed import Int4, Int8, Packed
from infer.quant.projection import Projection, Scheme, WeightSpec


def _integers(packed: type[Packed]) -> Callable[[WeightSpec], Projection]:
    """The integers of a CPU's kernels, or those of a GPU where the spec names their form."""
    return lambda spec: packed(spec) if spec.form is None else GPUWeights(spec)


SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme(name="none", devices=("cpu", "cuda"), make=Dense),
        Scheme(
            name="fp8",
            devices=("cuda",),
            make=GPUWeights,
            cost="KL 0.02 to 0.03 on SmolLM2-135M",
        ),
        Scheme(
            name="int8",
            devices=("cpu", "cuda"),
            make=_integers(Int8),
            cost="KL 0.004 on SmolLM2-135M",
        ),
        Scheme(
            name="int4",
            devices=("cpu", "cuda"),
            make=_integers(Int4),
            cost="KL 0.08 on stories15M",
        ),
    )
}

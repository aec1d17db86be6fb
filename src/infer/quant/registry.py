"""Every scheme, a way to store weights: one row each (docs/adding-a-scheme.md).

A row's `make` is for matrices without a `CodedForm`; `GPUWeights` stores those with one. So int8 and int4 are
integers in groups of 32 for a CPU's kernels, but on a GPU codes in the form of the matrix
(loader/weight_plan.py).
"""

from __future__ import annotations

from infer.quant.dense import Dense
from infer.quant.gpu_schemes import GPUWeights
from infer.quant.packed import Int4, Int5, Int6, Int8, Mxfp4, PackedRuns
from infer.quant.projection import Scheme

FILE_SCHEMES: dict[str, Scheme] = {  # formats of files: weights are never rounded to them
    "mxfp4": Scheme(name="mxfp4", devices=("cpu", "cuda"), make=Mxfp4),
    **{
        name: Scheme(name=name, devices=("cuda",), make=GPUWeights) for name in ("lut4", "nf4", "fp4", "e5m2")
    },
    "int5": Scheme(name="int5", devices=("cpu",), make=Int5),
    "int6": Scheme(name="int6", devices=("cpu",), make=Int6),
    "runs": Scheme(name="runs", devices=("cpu",), make=PackedRuns),
}
SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme(name="none", devices=("cpu", "cuda"), make=Dense),
        Scheme(name="fp8", devices=("cuda",), make=GPUWeights, cost="KL 0.02 to 0.03 on SmolLM2-135M"),
        Scheme(name="int8", devices=("cpu", "cuda"), make=Int8, cost="KL 0.004 on SmolLM2-135M"),
        Scheme(name="int4", devices=("cpu", "cuda"), make=Int4, cost="KL 0.08 on stories15M"),
    )
}

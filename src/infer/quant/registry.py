"""Every way to keep weights: one row each (docs/adding-a-scheme.md)."""

from __future__ import annotations

from infer.quant.dense import Dense
from infer.quant.packed import Int4, Int8
from infer.quant.projection import Scheme

SCHEMES: dict[str, Scheme] = {
    row.name: row
    for row in (
        Scheme(name="none", devices=("cpu", "cuda"), make=Dense),
        Scheme(name="int8", devices=("cpu",), make=Int8),
        Scheme(name="int4", devices=("cpu",), make=Int4),
    )
}

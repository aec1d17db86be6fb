"""Weights in groups of 32 that share a scale, as int8 or int4, in the layout of kernels/cpu.

    int8   w = d * q,      q in -127 .. 127      8.5 bits per weight
    int4   w = d * q + m,  q in 0 .. 15          5 bits per weight; holds 4-bit files without rounding
    int5   w = d * q + m,  q in 0 .. 31          6 bits per weight: Q5_0, Q5_1 and Q5_K of GGUF files
    int6   w = d * q,      q in -32 .. 31        7 bits per weight, groups of 16: Q6_K and Q3_K

The minimum m of a group costs half a bit per weight and very little time. It pays off because sixteen steps
are too few to waste any on an empty range, and because 4-bit file formats have minima, too.

Activations are quantised during the product, 32 at a time, so products are integer arithmetic. A few channels
are much larger than the rest, so 8 bits would cost more accuracy here than in weights. Activations therefore
have 15 bits, in two digits (csrc/linear.h); with `cpu_products=fast` they have one digit.

Rows are filled in any order, so a fused matrix takes its parts as they come from the disk.

The head has 8 bits even in an int4 model, because its errors go straight into the logits. A tied embedding
reads its rows from the packed head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from infer.errors import CheckpointError
from infer.kernels.cpu import operations
from infer.kernels.cpu.library import MXFP4, Library, library, why_not
from infer.kernels.cpu.program import empty
from infer.kernels.linear.coded import CodedForm
from infer.kernels.runtime.dispatch import device_kind, moment
from infer.kernels.runtime.torch_threads import one_thread
from infer.quant.coded import CodedRows
from infer.quant.memory import WeightMemory
from infer.quant.projection import Projection, Source, WeightSpec
from infer.quant.rounding import fit_rows, round_rows

# the forms that kernels/cpu supports, by bits
_FORMS = {8: CodedForm("int8", 32), 4: CodedForm("int4", 32, has_minima=True)}


class QuantizedRows(NamedTuple):
    """Rows of a matrix in groups of 32 small integers, in the form that a `PackedMatrix` keeps."""

    integers: torch.Tensor  # int8, [rows, K]
    scales: torch.Tensor  # float16, [rows, K / 32]; in 6 bits, scales of the first 16 of each 32
    minima: torch.Tensor | None  # the same, in 4 and 5 bits; in 6 bits, the scales of the second 16


def quantized_rows(rows: CodedRows, bits: int) -> QuantizedRows | None:
    """Return a file's codes unchanged; None: groups are not whole 32s, or the codes do not fit.

    Scales and minima become float16. A 16-bit scale loses nothing; a minimum, the product of a zero and a
    scale, loses at most one part in 2000. If one is too large or too small, the result is None.
    """
    part = fit_rows(rows, _FORMS[bits])
    if part is None:
        return None
    exact = [part.scales, *([] if part.minima is None else [part.minima - part.scales * part.zeros])]
    scales, *minima = (each.half().contiguous() for each in exact)
    for half, each in zip((scales, *minima), exact, strict=True):
        if not bool(((half.float() - each).abs() <= each.abs() / 1024).all()):
            return None
    return QuantizedRows(part.codes.view(torch.int8).contiguous(), scales, minima[0] if minima else None)


class PackedMatrix:
    """One [out, in] matrix of small integers."""

    def __init__(
        self, library: Library, num_rows: int, size: int, bits: int, memory: WeightMemory | None = None
    ) -> None:
        assert bits in (4, 5, 6, 8), bits
        self.num_rows, self.size, self.bits = num_rows, size, bits
        self.kind = bits  # kind of the kernels: the bits, or `MXFP4`
        self.digits = operations.EXACT_DIGITS  # digits that activations are rounded to
        self.order: torch.Tensor | None = None  # act-order: the column of x for each stored column
        self._library = library
        data_bytes, scale_bytes = operations.packed_bytes(num_rows, size, bits)
        # Fresh memory is zero, also in the last tile's unused rows, which are computed and discarded.
        memory = memory or WeightMemory(data_bytes + scale_bytes + 64)
        self.data = memory.take(data_bytes)
        self.scales = memory.take(scale_bytes).view(torch.float16)
        self.num_bytes = data_bytes + scale_bytes

    def fill(self, rows: torch.Tensor, first: int) -> None:
        """Quantise float32 rows into place."""
        assert rows.shape[1] == self.size and first + len(rows) <= self.num_rows, (rows.shape, first)
        operations.pack(self._library, rows, self.data, self.scales, first=first, bits=self.bits)

    def fill_integers(
        self, integers: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, first: int
    ) -> None:
        """Put quantised rows, in groups of 32, into place; minima are as in `QuantizedRows`."""
        assert integers.shape[1] == self.size and first + len(integers) <= self.num_rows, integers.shape
        operations.pack_integers(
            self._library, integers, scales, minima, self.data, self.scales, first=first, bits=self.bits
        )

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x Wᵀ + b; `out`: columns of a wider result, which are filled."""
        rows = x if x.dim() == 2 else x.reshape(-1, self.size)
        y = operations.linear(
            self._library, rows, self.data, self.scales, bias,
            num_rows=self.num_rows, bits=self.kind, digits=self.digits, order=self.order, out=out,
        )  # fmt: skip
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.num_rows)

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Look up rows as float32, for a tied embedding."""
        rows = operations.embed(
            self._library, ids_T, self.data, self.scales,
            num_rows=self.num_rows, size=self.size, kind=self.kind,
        )  # fmt: skip
        return rows if self.order is None else rows[:, self.order.argsort()]

    def dequantized(self) -> torch.Tensor:
        """The whole matrix as float32."""
        return self.lookup(torch.arange(self.num_rows))


class Packed(Projection):
    """A projection with integer weights, one `PackedMatrix` per expert; loading packs dense weights."""

    batch_invariant = True  # each row is quantised and multiplied independently
    bits: int

    def __init__(self, spec: WeightSpec, matrices: list[PackedMatrix] | None = None) -> None:
        self.matrices = matrices or []
        super().__init__(spec)

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate integers and scales; on the meta device, only their shapes."""
        spec = self.spec
        num_matrices = spec.num_experts or 1
        if device_kind(spec.device) == "meta":
            num_bytes = sum(operations.packed_bytes(spec.num_rows, spec.size, self.bits)) * num_matrices
            num_bytes += spec.has_order * spec.size * 4 * num_matrices
            return {"packed": torch.empty(num_bytes, dtype=torch.uint8, device="meta")}
        if not self.matrices:
            c = library()
            assert c is not None, why_not()
            self.matrices = [
                PackedMatrix(c, spec.num_rows, spec.size, self.bits, spec.memory) for _ in range(num_matrices)
            ]
        for matrix in self.matrices if spec.has_order else ():
            matrix.order = (
                torch.arange(spec.size, dtype=torch.int32) if matrix.order is None else matrix.order
            )
        return {
            f"{name}_{number}": tensor
            for number, matrix in enumerate(self.matrices)
            for name, tensor in (("data", matrix.data), ("scales", matrix.scales), ("order", matrix.order))
            if tensor is not None
        }

    def load(self, source: Source, *, part: str | None, expert: int | None, transposed: bool) -> None:
        """Quantise a stored matrix into its rows, a few of them at a time."""
        with one_thread():  # PyTorch uses one thread, because packing has its own threads
            super().load(source, part=part, expert=expert, transposed=transposed)

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Put a file's integers into place if these kernels support them; otherwise quantise the numbers."""
        matrix = self.matrices[expert]
        if matrix.order is not None and isinstance(rows, CodedRows):
            rows, order = rows.in_order()
            matrix.order.copy_(order)
        integers = quantized_rows(rows, matrix.bits) if isinstance(rows, CodedRows) else None
        if integers is not None:
            matrix.fill_integers(*integers, first)
            return
        # a copy of plain numbers, because a mapped file is read from the disk when it is first touched
        numbers = rows.numbers() if isinstance(rows, CodedRows) else rows.to(torch.float32, copy=True)
        begin = moment(self.spec.device)
        matrix.fill(numbers.contiguous(), first)
        self._made.append((begin, moment(self.spec.device)))

    def use_digits(self, digits: int) -> None:
        """Round activations to `digits` digits from now on, also in experts."""
        for matrix in self.matrices:
            matrix.digits = digits

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b in integer arithmetic."""
        return self.matrices[0].multiply(x, self.bias)

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix as float32."""
        return self.matrices[0].lookup(ids_T)

    def make_expert(self, number: int, spec: WeightSpec) -> Projection:
        """Make the projection of one expert from its matrix."""
        return type(self)(spec, [self.matrices[number]])


class Int8(Packed):
    """8.5 bits per weight."""

    scheme, bits = "int8", 8


class Mxfp4(Packed):
    """4-bit floats as their file stores them; 5 bits per weight with scales.

    csrc/linear.h explains how they become the unsigned integers of the products. Scales are float16 here:
    a scale below 2^-24 becomes 0, and one above 2^12 cannot be a weight's.
    """

    scheme, bits = "mxfp4", 4

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate the layout of int4; products look codes up in a table."""
        tensors = super().allocate()
        for matrix in self.matrices:
            matrix.kind = MXFP4
        return tensors

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Put a file's codes into place; plain numbers, which only random weights have, are rounded."""
        form = CodedForm("mxfp4", 32)
        part = fit_rows(rows, form) if isinstance(rows, CodedRows) else round_rows(rows, form)
        assert part is not None, "codes of another format"
        steps = part.scales / 2  # halved, because the integers are twice the floats
        if bool((steps > 4096).any()):
            raise CheckpointError("an MXFP4 matrix has a scale above 2^13: the file is damaged")
        integers = QuantizedRows(part.codes.view(torch.int8).contiguous(), steps.half(), (-12 * steps).half())
        self.matrices[expert].fill_integers(*integers, first)


class Int5(Packed):
    """6 bits per weight: integers of up to 5 bits as their file has them."""

    scheme, bits = "int5", 5

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Put a file's integers into place; only the scales are rounded, to float16."""
        assert isinstance(rows, CodedRows), "only files have these integers"
        self.matrices[expert].fill_integers(*self._integers(rows), first)

    def _integers(self, rows: CodedRows) -> QuantizedRows:
        shift = 16 if rows.codes.dtype is torch.int8 else 0
        shifted = rows._replace(
            codes=(rows.codes + shift).view(torch.uint8), zeros=rows.zeros + shift, bits=4
        )
        part = fit_rows(shifted, _FORMS[4])
        assert part is not None and part.minima is not None, "integers of another format"
        return _halved(part.codes, part.scales, part.minima - part.scales * part.zeros)


class Int6(Int5):
    """7 bits per weight: integers of up to 6 bits in groups of 16."""

    scheme, bits = "int6", 6

    def _integers(self, rows: CodedRows) -> QuantizedRows:
        assert rows.groups == 16 and rows.codes.dtype is torch.int8, "integers of another format"
        return _halved(rows.codes + 32, rows.scales[:, ::2], rows.scales[:, 1::2])


def _halved(integers: torch.Tensor, *scales: torch.Tensor) -> QuantizedRows:
    """Convert the scales and minima of rows to float16.

    Very small scales lose precision, but no more than the float16 in the file has, whose multiples they are.
    """
    halves = [each.half().contiguous() for each in scales]
    if not all(bool(half.isfinite().all()) for half in halves):
        raise CheckpointError("a GGUF matrix has a scale above 65504: the file is damaged")
    return QuantizedRows(integers.view(torch.int8).contiguous(), *halves)


class Int4(Packed):
    """5 bits per weight; the head keeps 8."""

    scheme, bits = "int4", 4


class PackedRuns(Packed):
    """A fused matrix whose parts have different bits in the file, kept as runs of rows, each in its own form.

    In a "Q4_K_M" file values are Q6_K in every other layer, queries and keys Q4_K. Each run is a separate
    product, which fills its columns of the result.
    """

    def __init__(self, spec: WeightSpec) -> None:
        kinds = {8: Int8, 6: Int6, 5: Int5, 4: Int4}
        self.runs = [kinds[bits](replace(spec, num_rows=rows, parts={}, runs=())) for rows, bits in spec.runs]
        self.scheme = "+".join(dict.fromkeys(run.scheme for run in self.runs))
        super().__init__(spec, [matrix for run in self.runs for matrix in run.matrices])

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate the tensors of every run."""
        tensors = [(number, run.tensors) for number, run in enumerate(self.runs)]
        return {f"{name}_{number}": tensor for number, held in tensors for name, tensor in held.items()}

    def fill(self, rows: CodedRows | torch.Tensor, first: int, expert: int) -> None:
        """Put rows of one part into the part's run."""
        for run in self.runs:
            if first < run.spec.num_rows:
                run.fill(rows, first, expert)
                return
            first -= run.spec.num_rows

    def bytes_by_scheme(self) -> dict[str, int]:
        """The bytes of all runs, by scheme."""
        found: dict[str, int] = {}
        for run in self.runs:
            found[run.scheme] = found.get(run.scheme, 0) + run.num_bytes()
        return found

    def making_seconds(self) -> float:
        """Seconds spent making codes that were not in the file, of all runs."""
        return sum(run.making_seconds() for run in self.runs)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b in integer arithmetic."""
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y, start = empty((len(rows), self.spec.num_rows)), 0
        for matrix in self.matrices:
            part = slice(start, start + matrix.num_rows)
            matrix.multiply(rows, None if self.bias is None else self.bias[part], y[:, part])
            start = part.stop
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix as float32."""
        whole = torch.cat([matrix.dequantized() for matrix in self.matrices])
        return whole[ids_T]

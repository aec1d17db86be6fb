"""The form for the codes of a matrix, given the codes of the tensors that fill it.

On a GPU codes have a `CodedForm` (kernels/linear/coded.py). A file's own codes are kept if a form has the
same groups. Parts of a fused matrix are kept if one form fits them all. If 16-bit numbers are rounded, the
form is chosen to suit the matrix:

    file, part by part          ──►  form of the fused matrix
    int4 g128, int4 g128             int4, groups of 128
    int4 g128, int4 g32              int4, groups of 32: scales of the first part are repeated
    int4, int8                       int8: 4-bit codes are widened to 8 bits
    int4, BF16                       none: the matrix is unpacked to the dtype

On a CPU a matrix has 4 bits if all its parts do, and the head always has 8 (quant/packed.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from infer.kernels.cpu.library import MXFP4, library
from infer.kernels.linear.coded import FOUR_BITS, CodedForm
from infer.loader.formats.checkpoint import StoredTensor
from infer.quant.coded import StoredCodes
from infer.quant.rounding import BLOCK_ROWS

GROUPS = (128, 64, 32)  # possible group sizes of a form, in columns


def form_of(tensor: StoredTensor) -> CodedForm | None:
    """Return the form that keeps a tensor's codes unchanged; None: it has no codes, or no form fits them."""
    return None if tensor.codes is None else stored_form(tensor.codes)


def is_four_bit(tensors: Sequence[StoredTensor]) -> bool:
    """Return True if 4 bits hold all of these tensors; act-order tensors must share their order."""
    forms = [form_of(tensor) for tensor in tensors]
    is_int4 = bool(forms) and all(form is not None and form.codes == "int4" for form in forms)
    return (is_int4 and len(orders_of(tensors)) == 1) or is_mxfp4(tensors)


def cpu_bits(tensors: Sequence[StoredTensor]) -> int:
    """Return the bits in which a CPU keeps all of these tensors: 4, 5, 6 or 8."""
    if is_four_bit(tensors):
        return 4
    bits = {
        4 if is_four_bit([tensor]) else (tensor.codes and tensor.codes.cpu_bits) or 8 for tensor in tensors
    }
    found = next((kind for kind, held in ((5, {4, 5}), (6, {6})) if bits and bits <= held), 8)
    c = library()
    return found if c is not None and found in c.linear and len(orders_of(tensors)) == 1 else 8


def part_bits(tensors: Sequence[StoredTensor], has_experts: bool) -> set[int]:
    """Return the bits that keep a matrix: one number, or the bits of each part if the whole needs 8."""
    joined = cpu_bits(tensors)
    is_one = joined < 8 or has_experts or len(orders_of(tensors)) > 1
    return {joined} if is_one else {cpu_bits([tensor]) for tensor in tensors}


def orders_of(tensors: Sequence[StoredTensor]) -> set[str]:
    """Return the column orders of these tensors (`StoredCodes.order`)."""
    return {"" if tensor.codes is None else tensor.codes.order for tensor in tensors}


def is_mxfp4(tensors: Sequence[StoredTensor]) -> bool:
    """Return True if all of these tensors are MXFP4 and the C kernels can multiply it."""
    forms = [form_of(tensor) for tensor in tensors]
    return bool(forms) and all(form and form.codes == "mxfp4" for form in forms) and multiplies_mxfp4()


def multiplies_mxfp4() -> bool:
    """Return True if C kernels for MXFP4 are available."""
    c = library()
    return c is not None and MXFP4 in c.linear


def stored_form(stored: StoredCodes) -> CodedForm | None:
    """Return the form of a file's own groups; None if their sizes differ or are not multiples of 32."""
    kind, size, group, has_minima, scale_rows, *_ = stored
    is_shared = (
        scale_rows == BLOCK_ROWS and group % GROUPS[0] == 0 and kind not in FOUR_BITS and not has_minima
    )
    rows = BLOCK_ROWS if is_shared else 1  # 1: each of the 128 rows gets its own copy of the scale
    if group >= size:
        return CodedForm(kind, 0, has_minima, rows)
    steps = (group, *GROUPS) if group % GROUPS[0] == 0 else GROUPS
    shared = next((step for step in steps if group and group % step == 0), None)
    return None if shared is None else CodedForm(kind, shared, has_minima, rows)


def joined_form(forms: Sequence[CodedForm | None], size: int, row_counts: Sequence[int]) -> CodedForm | None:
    """Return the form that fits all parts of a fused matrix with these row counts; None: none does."""
    found = [form for form in forms if form is not None]
    kinds = {form.codes for form in found}
    if not found or len(found) < len(forms) or (len(kinds) > 1 and not kinds <= {"int4", "int8"}):
        return None
    group = math.gcd(*(form.group or size for form in found))
    is_blocked = all(form.scale_rows == BLOCK_ROWS for form in found)
    is_blocked = is_blocked and all(count % BLOCK_ROWS == 0 for count in row_counts[:-1])
    kind = "int8" if len(kinds) > 1 else found[0].codes
    group = size if all(form.group == 0 for form in found) else group
    has_minima = any(form.has_minima for form in found)
    return stored_form(StoredCodes(kind, size, group, has_minima, BLOCK_ROWS if is_blocked else 1))


def rounded_form(scheme: str, size: int) -> CodedForm:
    """Return the form for rounding a matrix with `size` columns; int8 if no int4 group size divides it."""
    if scheme != "int4":
        return CodedForm(scheme)
    group = next((group for group in GROUPS if size % group == 0), 0)
    return CodedForm("int4", group) if group else CodedForm("int8")

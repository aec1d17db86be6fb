"""TMA descriptors: the address and rows of a matrix, and the boxes that TMA copies to shared memory.

TMA (tensor memory accelerator) is the unit of Hopper and later GPUs that copies tiles without threads.

The driver encodes a descriptor in 128 bytes, a *tensor map*, which a kernel takes as an argument. Boxes here
are rows of 128 bytes, written to shared memory in the layout that tensor cores read (linear/wgmma.cuh).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from infer.errors import DeviceLost
from infer.kernels.runtime import cuda_build as build

BOX_BYTES = 128
BOX_COLUMNS = BOX_BYTES // 2  # columns of 16-bit numbers

_SIZE, _ALIGNMENT = 128, 64
_DTYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B, _PROMOTE_TO_256B = 3, 3


class Boxes(NamedTuple):
    """A matrix [rows, columns] of 16-bit or 8-bit numbers, and the shape of the boxes copied from it."""

    address: int
    dtype: torch.dtype
    num_rows: int
    num_columns: int
    row_bytes: int  # bytes from one row to the next
    box_rows: int
    num_boxes: int = 0  # adjacent boxes of columns in one copy; 0: a two-dimensional map


class TensorMap(ctypes.Structure):
    """A kernel argument that TMA reads; its `value` is set like the value of a ctypes number."""

    _fields_ = (("encoded", ctypes.c_ubyte * _SIZE),)

    def _set_value(self, boxes: Boxes) -> None:
        scratch = (ctypes.c_ubyte * (_SIZE + _ALIGNMENT))()
        aligned = -(-ctypes.addressof(scratch) // _ALIGNMENT) * _ALIGNMENT
        rank, box_columns = 3 if boxes.num_boxes else 2, BOX_BYTES // boxes.dtype.itemsize
        sizes = (ctypes.c_uint64 * rank)(boxes.num_columns, boxes.num_rows)
        strides = (ctypes.c_uint64 * (rank - 1))(boxes.row_bytes)
        box = (ctypes.c_uint32 * rank)(box_columns, boxes.box_rows)
        steps = (ctypes.c_uint32 * rank)(*(1,) * rank)
        if boxes.num_boxes:
            assert boxes.num_columns % box_columns == 0, boxes
            sizes[0], sizes[2] = box_columns, boxes.num_columns // box_columns
            strides[1], box[2] = BOX_BYTES, boxes.num_boxes
        code = encoder()(
            ctypes.c_void_p(aligned), _DTYPES[boxes.dtype], rank, ctypes.c_void_p(boxes.address),
            sizes, strides, box, steps, 0, _SWIZZLE_128B, _PROMOTE_TO_256B, 0,
        )  # fmt: skip
        if code:
            raise DeviceLost(f"the driver does not take {boxes} as a tensor map: error {code}")
        ctypes.memmove(self.encoded, aligned, _SIZE)

    value = property(fset=_set_value)


@functools.cache
def encoder() -> Any:
    """The driver's function that encodes tensor maps; raises BuildError if the driver has none."""
    try:
        return build.driver().cuTensorMapEncodeTiled
    except AttributeError:
        raise build.BuildError("the driver does not support tensor maps; update it") from None

"""The tensors of a `KVStore` as a whole, for tests of what is read of them."""

from __future__ import annotations

from itertools import chain

import torch

from infer.cache.kv_store import KVStore
from infer.kernels.elementwise.kv_codes import LARGEST


def fill_store(store: KVStore, value: float) -> None:
    """Overwrite everything: with NaN, reads of slots that were not written show."""
    for part in chain(*store._parts):
        if part.dtype in LARGEST:  # a code may have no such number; its scale has
            part.view(torch.uint8).fill_(0x7F)
        else:
            part.fill_(value)

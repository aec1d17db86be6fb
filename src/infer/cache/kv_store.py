"""The tensors behind the books: where keys and values really are.

One allocation for all layers, [L, 2, num_blocks, block_size, G, H]; a *slot* is one token's place in it,
`block * block_size + offset`, so seen flat a layer's keys are [num_slots, G, H]. Layers with other windows
lie in other blocks, so L is the number of layers to a block, and a layer's *plane* its place among them
(`layout.py`). The books (`kv_pool.py`) say what owns which block; this file only moves bytes where it is
told to.

Blocks are handed out uninitialised. Nothing may read a slot before the step that writes it: tests
fill the store with NaN and expect no trace of it.

Shapes:  L layers to a block, G kv heads, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.cache.layout import KVLayout
from infer.kernels.elementwise.copy_block import copy_block
from infer.kernels.runtime.dispatch import is_gpu


class KVStore:
    """Keys and values of every block on the device, and of the swapped blocks in host memory."""

    def __init__(
        self,
        *,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.device = device
        self.tables = layout.tables  # of each layer: which block table says where its blocks are
        shape = (layout.num_planes, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self._data = torch.empty(shape, dtype=dtype, device=device)
        host_shape = (layout.num_planes, 2, num_host_blocks, *shape[3:])
        self._host = torch.empty(host_shape, dtype=dtype, pin_memory=is_gpu(device) and num_host_blocks > 0)
        flat = self._data.view(layout.num_planes, 2, num_blocks * block_size, num_kv_heads, head_dim)
        self.keys = [flat[plane, 0] for plane in layout.planes]  # [num_slots, G, H] each
        self.values = [flat[plane, 1] for plane in layout.planes]
        if is_gpu(device) and num_blocks:
            self.transfer([("copy", 0, 0)])  # compiles the kernel now rather than within a request

    @property
    def num_bytes(self) -> int:
        """Device memory taken."""
        return self._data.numel() * self._data.element_size()

    def transfer(self, transfers: Sequence[tuple[str, int, int]]) -> None:
        """Carry out (kind, source, destination) moves in order: a destination may be a later source."""
        device, host = self._data, self._host
        sides = {"swap_out": (device, host), "swap_in": (host, device)}
        for kind, source, destination in transfers:
            if kind == "copy":
                copy_block(device, source, destination)
                continue
            source_side, destination_side = sides[kind]
            try:
                destination_side[:, :, destination].copy_(source_side[:, :, source], non_blocking=True)
            except (
                torch.OutOfMemoryError
            ):  # it is gathered on the device on its way; plane by plane it is not
                for to, of in zip(destination_side.flatten(0, 1), source_side.flatten(0, 1), strict=True):
                    to[destination].copy_(of[source], non_blocking=True)

    def fill(self, value: float) -> None:
        """Overwrite everything; for tests that look for reads of slots that were not written."""
        self._data.fill_(value)
        self._host.fill_(value)

"""The tensors behind the books: where keys and values really are.

One allocation for all layers, [L, 2, num_blocks, block_size, G, H]; a *slot* is one token's place in it,
`block * block_size + offset`, so seen flat a layer's keys are [num_slots, G, H]. Layers with other windows
lie in other blocks, so L is the number of layers to a block, and a layer's *plane* its place among them
(`layout.py`). The books (`paged_pool.py`) say what owns which block; this file only moves bytes where it is
told to.

Keys and values may be kept in 8 bits instead (kernels/elementwise/kv_codes.py). Then a second allocation has
their scales, [L, 2, num_blocks, G, block_size], and what moves a block moves both.

Layers with a state keep it in the bytes of a block: half of its heads where keys lie, half where values lie.
A further allocation has the tails of their convolutions, [L, 1, num_blocks, W - 1, C].

Blocks are handed out uninitialised. Nothing may read a slot before the step that writes it: tests
fill the store with NaN and expect no trace of it.

Shapes:  L layers to a block, G kv heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch

from infer.cache.layout import STATE, KVLayout, StateSize
from infer.kernels.delta.reference import StateCache
from infer.kernels.elementwise.copy_block import copy_block
from infer.kernels.elementwise.heads import CacheSlots
from infer.kernels.elementwise.kv_codes import LARGEST, KVScales
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
        kept_as: torch.dtype | None = None,
        fixed: torch.Tensor | None = None,
        state: StateSize | None = None,
    ) -> None:
        """`state`: the size of what layers of tables without keys keep in a block instead (layout.py)."""
        self.device, self.dtype = device, dtype  # device and number format of the model
        self.tables = layout.tables  # the block table of each layer
        shape = (layout.num_planes, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors on the device and in host memory

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            part, in_host = torch.empty(shape, dtype=dtype, device=device), (*shape[:2], num_host_blocks)
            pinned = is_gpu(device) and num_host_blocks > 0
            self._parts.append((part, torch.empty((*in_host, *shape[3:]), dtype=dtype, pin_memory=pinned)))
            return part

        whole = allocate(shape, kept_as or dtype)
        flat = whole.view(*shape[:2], num_blocks * block_size, *shape[4:])
        self.keys = [flat[plane, 0] for plane in layout.planes]  # [num_slots, G, H] each
        self.values = [flat[plane, 1] for plane in layout.planes]
        self.scales: list[KVScales | None] = [None for _ in layout.planes]
        if kept_as in LARGEST:
            scales = allocate((*shape[:3], num_kv_heads, block_size), torch.float32)
            self.scales = [KVScales(scales[plane, 0], scales[plane, 1]) for plane in layout.planes]
        self.fixed: list[torch.Tensor | None] = [None for _ in layout.planes]  # scales as in `CacheSlots`
        if fixed is not None:
            self.fixed = list(fixed.to(device))
        self.states: list[StateCache | None] = [None for _ in layout.planes]
        if state is not None:
            heads = state.num_heads // 2, *state.shape
            numbers_L2NX = whole.view(*shape[:3], -1).view(torch.float32)[..., : math.prod(heads)]
            states = numbers_L2NX.view(*shape[:3], *heads)
            tails = allocate((shape[0], 1, num_blocks, *state.tail), dtype)
            self.states = [
                StateCache(states[plane], tails[plane, 0])
                if layout.windows[table] == STATE else None
                for plane, table in zip(layout.planes, layout.tables, strict=True)
            ]  # fmt: skip
        if is_gpu(device) and num_blocks:
            self.transfer([("copy", 0, 0)])  # compiles the kernel now rather than within a request

    def slots(
        self, layer: int, slots_KT: torch.Tensor | Sequence[torch.Tensor], *, keeps: bool = False
    ) -> CacheSlots:
        """The cache of one layer, and in it the slots of a step's tokens, given those of each table."""
        keys, values, slots_T = self.keys[layer], self.values[layer], slots_KT[self.tables[layer]]
        return CacheSlots(keys, values, slots_T, keeps, self.scales[layer], self.fixed[layer])

    @property
    def num_bytes(self) -> int:
        """Device memory taken."""
        return sum(part.nbytes for part, _ in self._parts)

    @contextmanager
    def kept(self, num_blocks: int) -> Iterator[None]:
        """Put back, at the end of a `with` statement, what the first blocks held before it."""
        held = [part[:, :, :num_blocks].clone() for part, _ in self._parts]
        try:
            yield
        finally:
            for (part, _), blocks in zip(self._parts, held, strict=True):
                part[:, :, :num_blocks] = blocks

    def transfer(self, transfers: Sequence[tuple[str, int, int]]) -> None:
        """Carry out (kind, source, destination) moves in order: a destination may be a later source."""
        for (kind, source, destination), (device, host) in product(transfers, self._parts):
            if kind == "copy":
                copy_block(device, source, destination)
                continue
            source_side, destination_side = (device, host) if kind == "swap_out" else (host, device)
            try:
                destination_side[:, :, destination].copy_(source_side[:, :, source], non_blocking=True)
            except torch.OutOfMemoryError:  # it is gathered on the device; plane by plane it is not
                for to, of in zip(destination_side.flatten(0, 1), source_side.flatten(0, 1), strict=True):
                    to[destination].copy_(of[source], non_blocking=True)

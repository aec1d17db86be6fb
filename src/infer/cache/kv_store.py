"""The tensors of the KV cache.

All layers share one allocation, [L, 2, num_blocks, block_size, G, H]. A *slot* is the place of one token,
`block * block_size + offset`, so a layer's keys can be viewed as [num_slots, G, H]. Layers with different
windows use different blocks, so L is the number of layers per block, and a layer's *plane* is its index among
them (`layout.py`). `paged_pool.py` records who owns each block; this module only moves the bytes.

In host memory, blocks are contiguous, [num_host_blocks, L, 2, block_size, G, H], so a GPU's copy engine moves
each with one copy. On a GPU, blocks are copied in a separate stream, through a small buffer on the device
(`_Crossing`). Blocks on the way out are gathered there, so that a step may overwrite a block before its copy
has finished. Steps wait for incoming blocks; the host does not.

Keys and values may be kept in 8 bits instead (kernels/elementwise/kv_codes.py). Then a second allocation has
their scales, [L, 2, num_blocks, G, block_size], and every transfer covers both.

Layers with a state keep it in the bytes of a block: half of its heads in the keys, half in the values. A
further allocation has the tails of their convolutions, [L, 1, num_blocks, W - 1, C].

If layers differ in the size of their heads, G and H describe a plane, and a layer views its part of each
block as slots of its own width (`layout.py`).

Blocks are not initialized. Nothing may read a slot before the step that writes it: tests fill the store with
NaN and check that none appears in a result.

Shapes:  L layers per block, G kv heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise, product
from operator import itemgetter
from typing import Final

import torch

from infer.cache.layout import STATE, KVLayout, StateSize, TransferKind
from infer.kernels.delta.reference import StateCache
from infer.kernels.elementwise.copy_block import copy_block
from infer.kernels.elementwise.heads import CacheSlots
from infer.kernels.elementwise.kv_codes import LARGEST, KVScales
from infer.kernels.runtime.dispatch import is_gpu

CROSSING_BYTES: Final = 64 << 20  # size of the buffer for transfers between a GPU and host memory
MOST_CROSSING: Final = 64  # most blocks in this buffer


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
        """`state`: the size of the state that recurrent layers keep in a block (layout.py)."""
        self.device, self.dtype = device, dtype  # device and number format of the model
        self.num_host_blocks = num_host_blocks
        self.tables = layout.tables  # the block table of each layer
        shape = (layout.num_planes, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors on the device and in host memory

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            part, in_host = torch.empty(shape, dtype=dtype, device=device), (num_host_blocks, *shape[:2])
            pinned = is_gpu(device) and num_host_blocks > 0
            self._parts.append((part, torch.empty((*in_host, *shape[3:]), dtype=dtype, pin_memory=pinned)))
            return part

        whole = allocate(shape, kept_as or dtype)
        flat = whole.view(*shape[:2], num_blocks * block_size, *shape[4:])
        self.keys = [flat[plane, 0] for plane in layout.planes]  # [num_slots, G, H] each
        self.values = [flat[plane, 1] for plane in layout.planes]
        for layer, own in enumerate(layout.heads):
            first = layout.parts[layer] * block_size
            self.keys[layer] = self.keys[layer].view(-1, *own)[first:]
            self.values[layer] = self.values[layer].view(-1, *own)[first:]
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
        self._crossing: _Crossing | None = None
        if is_gpu(device) and num_host_blocks:
            num_places = CROSSING_BYTES * num_host_blocks // sum(host.nbytes for _, host in self._parts)
            if num_places:
                self._crossing = _Crossing(self._parts, min(num_places, num_host_blocks, MOST_CROSSING))
        if is_gpu(device) and num_blocks:  # compile and load kernels now, not during a request
            self.transfer([(TransferKind.COPY, 0, 0)])
            if num_host_blocks:
                self.transfer([(TransferKind.SWAP_OUT, 0, 0), (TransferKind.SWAP_IN, 0, 0)])

    def slots(
        self, layer: int, slots_KT: torch.Tensor | Sequence[torch.Tensor], *, keeps: bool = False
    ) -> CacheSlots:
        """Return one layer's cache with the slots of a step's tokens, given the slots of each table."""
        keys, values, slots_T = self.keys[layer], self.values[layer], slots_KT[self.tables[layer]]
        return CacheSlots(keys, values, slots_T, keeps, self.scales[layer], self.fixed[layer])

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory that the store takes."""
        return sum(part.nbytes for part, _ in self._parts)

    @contextmanager
    def kept(self, num_blocks: int) -> Iterator[None]:
        """Restore the contents of the first `num_blocks` blocks at the end of a `with` statement."""
        held = [part[:, :, :num_blocks].clone() for part, _ in self._parts]
        try:
            yield
        finally:
            for (part, _), blocks in zip(self._parts, held, strict=True):
                part[:, :, :num_blocks] = blocks

    def move_slots(self, moves_2M: torch.Tensor) -> None:
        """Copy slots to other slots in all layers; all are read before any is written.

        Only for stores with one table and layers of one size.
        """
        size = self._parts[0][0].shape[3]
        (source_M, place_M), (from_M, to_M) = moves_2M // size, moves_2M % size  # blocks, offsets in them
        for number, (part, _) in enumerate(self._parts):
            raw = part.view(torch.uint8) if part.itemsize == 1 else part  # torch cannot index 8-bit floats
            if number:  # scales
                raw[:, :, place_M, :, to_M] = raw[:, :, source_M, :, from_M]
            else:
                raw[:, :, place_M, to_M] = raw[:, :, source_M, from_M]

    def transfer(self, transfers: Sequence[tuple[TransferKind, int, int]]) -> None:
        """Perform (kind, source, destination) transfers in order: a destination may be a later source."""
        for kind, moves in groupby(transfers, key=itemgetter(0)):
            pairs = [move[1:] for move in moves]
            if kind != TransferKind.COPY and self._crossing is not None:
                self._crossing.cross(pairs, is_out=kind == TransferKind.SWAP_OUT)
                continue
            for (source, destination), (device, host) in product(pairs, self._parts):
                if kind == TransferKind.COPY:
                    copy_block(device, source, destination)
                    continue
                is_out = kind == TransferKind.SWAP_OUT
                here, there = (source, destination) if is_out else (destination, source)
                # plane by plane: gathering a very large block would need additional memory
                for on_device, on_host in zip(device.flatten(0, 1), host[there].flatten(0, 1), strict=True):
                    to, of = (on_host, on_device[here]) if is_out else (on_device[here], on_host)
                    to.copy_(of, non_blocking=True)


def crossing_bytes(block_bytes: int) -> int:
    """Return the size of the device buffer for swapping blocks of this size."""
    return min(CROSSING_BYTES, MOST_CROSSING * block_bytes)


class _Crossing:
    """Copies blocks between a GPU and host memory, some at a time, on a separate stream.

    The stream copies them in order, so a block that was just swapped out can be swapped in at once.
    """

    def __init__(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], num_places: int) -> None:
        self._parts, self._num_places = parts, num_places
        device = parts[0][0].device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_full: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_free: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty((num_places, *host.shape[1:]), dtype=host.dtype, device=device)
                         for _, host in parts]  # fmt: skip

    def cross(self, pairs: Sequence[tuple[int, int]], *, is_out: bool) -> None:
        """Copy blocks, given as (source, destination), to or from host memory."""
        steps, crossing = torch.cuda.current_stream(self._buffers[0].device), self._stream
        for start in range(0, len(pairs), self._num_places):
            batch = [
                (source, destination, buffer[place], device, host)
                for place, (source, destination) in enumerate(pairs[start : start + self._num_places])
                for buffer, (device, host) in zip(self._buffers, self._parts, strict=True)
            ]
            self._is_free.wait(steps if is_out else crossing)
            if is_out:
                for source, _, buffer, device, _ in batch:
                    copy_block(device, source, 0, buffer.unsqueeze(2))
                self._is_full.record(steps)
                self._is_full.wait(crossing)
            with torch.cuda.stream(crossing):
                self._copy(pairs[start : start + self._num_places], is_out=is_out)
            if not is_out:
                self._is_full.record(crossing)
                self._is_full.wait(steps)
                for _, destination, buffer, device, _ in batch:
                    copy_block(buffer.unsqueeze(2), 0, destination, device)
            self._is_free.record(crossing if is_out else steps)

    def _copy(self, pairs: Sequence[tuple[int, int]], *, is_out: bool) -> None:
        """Copy between the buffer and host memory; adjacent host blocks are copied together."""
        blocks = [pair[is_out] for pair in pairs]
        runs = [place for place, block in enumerate(blocks) if not place or block != blocks[place - 1] + 1]
        for first, stop in pairwise([*runs, len(blocks)]):
            there = slice(blocks[first], blocks[first] + stop - first)
            for buffer, (_, host) in zip(self._buffers, self._parts, strict=True):
                to, of = (host[there], buffer[first:stop]) if is_out else (buffer[first:stop], host[there])
                to.copy_(of, non_blocking=True)

"""The current memory of an engine's device, and the arena from which its steps allocate.

    total of the GPU
    ├── other processes
    └── this process, up to `device_memory`
        ├── runtime      CUDA's context and libraries
        ├── weights
        ├── arena        one block, as large as the largest step needs; every step takes its tensors from it
        ├── graphs       the pool of the captured steps, and the device half's buffers
        └── KV cache     the rest

**The arena** is a free block of PyTorch's caching allocator, which splits it for tensors of any size and
merges the pieces again. When an allocation fails, the allocator returns blocks to the driver, but only blocks
that are completely free. So a small tensor in the arena, the *pin*, keeps the whole block in this process,
whatever other processes do. Tensors of up to 1 MiB come from blocks of 2 MiB; a few of these are pinned in
the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.cache.host_bytes import free_host_bytes, host_memory
from infer.cache.memory import GPU_RUNTIME_BYTES, DeviceMemory
from infer.config.defaults import GPU_SHARE
from infer.config.knobs import format_bytes, parse_memory
from infer.errors import ConfigError, NoRoom
from infer.kernels.runtime.dispatch import is_gpu

PIN_BYTES = 2 << 20  # above 1 MiB, because smaller tensors do not come from large blocks
SMALL_BLOCK = 2 << 20
NUM_SMALL_BLOCKS = 8
# the allocator takes smaller arenas from blocks that it shares with other tensors
LEAST_ARENA = 32 << 20
MAX_PINS_TRIED = 1000  # gaps of 2 MiB in other blocks that may take a pin first


def look(device: torch.device, asked: str | None, *, free_host: int | None = None) -> DeviceMemory:
    """Return the current memory of a device; `asked`: device_memory, `free_host`: a CPU's free memory."""
    if not is_gpu(device):
        total, resident = host_memory()
        limit = None if asked is None else device_limit(asked, total)
        free_host = free_host_bytes() if free_host is None else free_host
        return DeviceMemory(total=total, free=free_host, held=resident, limit=limit)
    try:
        free, total = torch.cuda.mem_get_info(device)
    except torch.AcceleratorError as error:  # not even the driver's context fits
        raise NoRoom(
            f"{device} cannot be used: {str(error).splitlines()[0]}; other processes have probably taken its "
            "memory (nvidia-smi lists them); end them, or use another device"
        ) from None
    return DeviceMemory(
        total=total,
        free=free,
        held=torch.cuda.memory_reserved(device) + GPU_RUNTIME_BYTES,
        limit=None if asked is None else device_limit(asked, total),
        share=GPU_SHARE,
    )


def device_limit(asked: str, total: int) -> int:
    """Return the bytes of a device that an engine may use; more than the device has is refused."""
    limit = parse_memory(asked, total, "device_memory")
    if limit > total:
        raise ConfigError(
            f"device_memory is {asked!r}, but this device has {format_bytes(total)}; ask for less, or for a "
            "share such as 0.9"
        )
    return limit


def enforce_limit(device: torch.device, asked: str | None) -> None:
    """Make PyTorch's allocator refuse allocations beyond `device_memory`, if it is set."""
    if asked is None:
        return
    total = torch.cuda.mem_get_info(device)[1]
    share = (device_limit(asked, total) - GPU_RUNTIME_BYTES) / total
    torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), device)


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak of bytes that tensors take while `work` runs, less the bytes before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


class Arena:
    """Free GPU memory that stays reserved for this process as long as the arena exists."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes = max(num_bytes, LEAST_ARENA)
        torch.cuda.empty_cache()  # so that the allocator reuses no cached block for the arena
        block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        first = block.data_ptr()
        del block
        taken: list[torch.Tensor] = []  # all but the last lie in gaps of other blocks
        while len(taken) < MAX_PINS_TRIED:
            taken.append(torch.empty(PIN_BYTES, dtype=torch.uint8, device=device))
            if first <= taken[-1].data_ptr() < first + num_bytes:
                break
        quarters = [
            torch.empty(SMALL_BLOCK // 4, dtype=torch.uint8, device=device)
            for _ in range(4 * NUM_SMALL_BLOCKS)
        ]
        blocks = {tensor.data_ptr() // SMALL_BLOCK: tensor for tensor in quarters}
        self._pins = [taken[-1], *blocks.values()]

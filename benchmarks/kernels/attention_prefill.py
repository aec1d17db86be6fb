"""Time attention of chunks of prompts over the paged cache, as a share of what a matrix product reaches.

python -m benchmarks.kernels.attention_prefill [--sweep] [--seconds 80]

Counted are the multiplications below the causal diagonal, twice 2 * N * H for each pair of a token and a
position it sees. Fresh prompts are also given to the kernels that come with PyTorch, on contiguous k and v.
Where tiles are few over many keys, the same is measured without splits and with a list padded as for a graph.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.kernels.attention_decode import captured, seconds_of_replay
from infer.config.profiles.profile import PrefillConfig
from infer.kernels.attention.dense import DenseAttention
from infer.kernels.attention.paged import PagedKV
from infer.kernels.attention.prefill import (
    PrefillChunk,
    PrefillChunks,
    attend_fresh,
    attend_prefill,
    build_prefill_chunks,
    prefill_config,
    tokens_per_tile,
)
from infer.kernels.runtime.profiles import device_profile

# (start, num) of each chunk, N, G, H
Shape = tuple[tuple[tuple[int, int], ...], int, int, int]
SHAPES: tuple[Shape, ...] = (
    (((0, 512),) * 8, 16, 8, 128),
    (((0, 4096),) * 2, 16, 8, 128),
    (((0, 2048),) * 4, 32, 8, 64),
    (((0, 8192),), 32, 8, 128),
    (((6144, 2048),) * 2, 32, 8, 128),
    (((30720, 2048),), 16, 8, 128),
    (((8064, 128),), 16, 8, 128),  # a prompt that was found in the prefix cache
    (((8064, 128),), 32, 8, 64),
    (((8064, 128),), 32, 8, 128),
    (((8064, 512),), 16, 8, 128),
    (((4000, 64), (8000, 128), (0, 200), (500, 120)), 16, 8, 128),  # chunks beside rows that decode
    (((100, 28), (0, 100)), 16, 8, 128),
)
BLOCK_SIZE = 16
_CALLS = 8  # in one graph, each on a store of its own
_FEW_TOKENS = 512  # steps with no more than that are replayed as graphs
_EMPTY_TILES = 16  # that a graph's list may end in


def gemm_rate() -> float:
    """Floating point operations per second of an 8192^3 product in bfloat16, on random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of_replay(captured(lambda: a @ b))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The inputs of some layers of a step."""

    chunks: list[PrefillChunk]
    q: torch.Tensor
    stores: list[tuple[torch.Tensor, torch.Tensor]]
    tables: torch.Tensor

    @property
    def num_flops(self) -> int:
        """Of one layer."""
        _, N, H = self.q.shape
        return sum(4 * N * H * (num * start + num * (num + 1) // 2) for _, num, _, start in self.chunks)

    def batch(self, block_m: int = 128) -> PrefillChunks:
        """The chunks in tiles of so many rows."""
        per_tile = tokens_per_tile(self.q.shape[1], self.stores[0][0].shape[1], block_m)
        tiles = build_prefill_chunks(self.chunks, tokens_per_tile=per_tile)
        return PrefillChunks.from_arrays(torch.from_numpy(tiles).cuda(), self.chunks)

    def padded_batch(self) -> PrefillChunks:
        """The tiles as a graph has them: with empty ones, and without a host that knows their lengths."""
        tiles_W4 = self.batch().tiles_W4
        return PrefillChunks.from_arrays(torch.cat((tiles_W4, tiles_W4.new_zeros(_EMPTY_TILES, 4))))


def make_prompts(shape: Shape) -> Prompts:
    """Random numbers, and tables whose blocks lie in random order."""
    spans, N, G, H = shape
    chunks, first = [], 0
    for row, (start, num) in enumerate(spans):
        chunks.append(PrefillChunk(first, num, row, start))
        first += num
    blocks_per_row = max(-(-(start + num) // BLOCK_SIZE) for start, num in spans)
    num_blocks = blocks_per_row * len(spans)
    stores = []
    for _ in range(_CALLS):
        keys, values = (
            torch.randn(num_blocks * BLOCK_SIZE, G, H, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        stores.append((keys, values))
    q = torch.randn(first, N, H, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(num_blocks, device="cuda").to(torch.int32).view(len(spans), blocks_per_row)
    return Prompts(chunks, q, stores, tables)


def seconds_paged(
    prompts: Prompts,
    config: PrefillConfig | None,
    *,
    batch: PrefillChunks | None = None,
    num_splits: int | None = None,
) -> float:
    """Time of one layer through the block tables."""
    chunks = batch or prompts.batch(config.block_m if config else 128)
    out = torch.empty_like(prompts.q)

    def step() -> None:
        for keys, values in prompts.stores:
            kv = PagedKV(keys, values, prompts.tables, BLOCK_SIZE, prompts.q.shape[2] ** -0.5)
            attend_prefill(prompts.q, kv, chunks, out=out, config=config, num_splits=num_splits)

    return seconds_of_replay(captured(step)) / len(prompts.stores)


def seconds_fresh(prompts: Prompts, dense: DenseAttention | None) -> float:
    """Time of one layer through PyTorch's FlashAttention or cuDNN; eager, for lengths come from the host."""
    batch, out = prompts.batch(), torch.empty_like(prompts.q)
    num_tokens = prompts.q.shape[0]
    batches = dense.split(batch.chunks)[0] if dense else []

    def step() -> None:
        for keys, values in prompts.stores:
            k, v, scale = keys[:num_tokens], values[:num_tokens], prompts.q.shape[2] ** -0.5
            if dense is None:
                attend_fresh(prompts.q, k, v, batch, scale=scale, window=None, out=out)
            else:
                dense.attend(prompts.q, k, v, batches, out=out)

    return seconds_of_stream(step) / len(prompts.stores)


def seconds_of_stream(step: Callable[[], None]) -> float:
    """Best of a few runs of a whole step."""
    times = []
    for _ in range(4):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return min(times)


def report(name: str, seconds: float, prompts: Prompts, ceiling: float) -> None:
    """One line."""
    rate = prompts.num_flops / seconds
    print(
        f"    {name:60} {seconds * 1e6:9.1f} us  {rate / 1e12:6.1f} TFLOP/s  {rate / ceiling:6.1%}",
        flush=True,
    )


def sweep(prompts: Prompts, ceiling: float, deadline: float) -> None:
    """Every combination that fits, until time is up; the five best."""
    times: dict[PrefillConfig, float] = {}
    candidates = [
        PrefillConfig(block_n, num_warps, num_stages, block_m)
        for block_m, num_warps in ((128, 8), (64, 4), (128, 4), (256, 8))
        for block_n in (64, 128, 32)
        for num_stages in (3, 2, 4)
    ]
    for config in candidates:
        if time.monotonic() > deadline:
            break
        try:
            times[config] = seconds_paged(prompts, config)
        except Exception as error:  # too much shared memory, mostly
            print(f"    {config}: {str(error).splitlines()[0][:80]}")
    for config, seconds in sorted(times.items(), key=lambda item: item[1])[:5]:
        report(str(config), seconds, prompts, ceiling)


def main(argv: list[str] | None = None) -> int:
    """Parse the flags, measure, print."""
    parser = argparse.ArgumentParser(description="time attention of chunks of prompts")
    parser.add_argument("--sweep", action="store_true", help="try the compile options")
    parser.add_argument("--seconds", type=float, default=80.0, help="time for the sweep of all shapes")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    began = time.monotonic()
    ceiling = gemm_rate()
    print(f"{torch.cuda.get_device_name()}, a matrix product: {ceiling / 1e12:.0f} TFLOP/s")
    for index, shape in enumerate(SHAPES):
        spans, N, G, H = shape
        prompts = make_prompts(shape)
        kinds = ", ".join(f"{spans.count(s)} x (start {s[0]}, num {s[1]})" for s in dict.fromkeys(spans))
        print(f"{kinds}  N {N} G {G} H {H}")
        report("paged", seconds_paged(prompts, None), prompts, ceiling)
        config = prefill_config(device_profile(prompts.q.device).attention, prompts.q.dtype, N, G, H)
        if config.programs_per_sm == 2:  # registers for a second program, where the compiler took too many
            limited = replace(config, max_registers=65536 // (2 * 32 * config.num_warps))
            report(
                f"paged, {limited.max_registers} registers", seconds_paged(prompts, limited), prompts, ceiling
            )
        if prompts.q.shape[0] <= _FEW_TOKENS:
            report("paged, no splits", seconds_paged(prompts, None, num_splits=1), prompts, ceiling)
            padded = seconds_paged(prompts, None, batch=prompts.padded_batch())
            report("paged, the list of a graph", padded, prompts, ceiling)
        if prompts.batch().are_fresh:
            report("flash", seconds_fresh(prompts, None), prompts, ceiling)
            dense = DenseAttention(
                num_heads=N, num_kv_heads=G, head_dim=H, scale=H**-0.5, dtype=prompts.q.dtype,
                device=prompts.q.device, max_tokens=prompts.q.shape[0], max_len=prompts.q.shape[0],
            )  # fmt: skip
            while dense.prepare():
                pass
            if not dense.split(prompts.batch().chunks)[1]:
                report("cudnn", seconds_fresh(prompts, dense), prompts, ceiling)
        if arguments.sweep:
            sweep(prompts, ceiling, began + arguments.seconds * (index + 1) / len(SHAPES))
    return 0


if __name__ == "__main__":
    sys.exit(main())

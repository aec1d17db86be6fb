"""Time attention of decoding rows over the paged cache, as a share of what reading memory allows.

python -m benchmarks.kernels.attention_decode [--sweep] [--shape S,len,N,G,H] [--seconds 80] [--kv fp8]

A step of several layers is captured into one CUDA graph, each layer with a store of its own, so that memory
and not the cache serves the keys. The figure is bytes of keys and values per second; the ceiling is a kernel
that only reads, measured in the same run. Blocks lie in random order. `--sweep` tries the compile and launch
options at each shape and prints the best; `plan` is the time of the work list, paid once per step. The CUDA
C++ kernel, which takes the same list, stands below Triton's, and both must agree. With `--kv` keys and values
are of 8 bits (kernels/elementwise/kv_codes.py), and the bytes are those of codes and scales.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from infer.cache.memory import kv_bytes_per_token
from infer.config.profiles.profile import DecodeConfig
from infer.kernels.attention.decode import attend_decode
from infer.kernels.attention.decode_cuda import attend_decode_cuda
from infer.kernels.attention.decode_work import DecodeWork
from infer.kernels.attention.paged import PagedKV
from infer.kernels.elementwise.kv_codes import KVScales, encode_reference
from infer.kernels.runtime.dispatch import jit, num_sms, tl

SHAPES = (
    (1, 512, 16, 8, 128),
    (1, 4096, 32, 8, 128),
    (32, 512, 16, 8, 128),
    (128, 512, 32, 8, 64),
    (256, 800, 16, 8, 128),
    (256, 1024, 32, 8, 128),
)
BLOCK_SIZE = 16
_MIN_LAYERS, _MAX_LAYERS = 8, 64
_ROTATED_BYTES = 512 << 20  # several times the L2 cache
_REPLAYS = 10


@jit
def _read_kernel(x_ptr, sums_ptr, num_tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        total += tl.load(x_ptr + tile * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)  # 2^29 elements
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, axis=0))


def seconds_of_replay(graph: torch.cuda.CUDAGraph) -> float:
    """Median over some replays, after two to warm up."""
    times_ms = []
    for repetition in range(_REPLAYS + 2):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repetition >= 2:
            times_ms.append(start.elapsed_time(end))
    return float(statistics.median(times_ms)) / 1e3


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`call` as a graph, compiled and warmed up before."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # the inputs may still be on their way
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def read_bandwidth() -> float:
    """Bytes per second of a kernel that reads 1 GiB and writes next to nothing."""
    x = torch.randn(1 << 29, device="cuda").bfloat16()
    num_programs = num_sms(x.device) * 8
    sums = torch.empty(num_programs, device="cuda")
    graph = captured(
        lambda: _read_kernel[(num_programs,)](x, sums, x.numel() // 8192, BLOCK=8192, num_warps=8)
    )
    return x.numel() * x.element_size() / seconds_of_replay(graph)


@dataclass(frozen=True, slots=True)
class Layers:
    """The inputs of a step: queries, a store per layer, tables in random order."""

    shape: tuple[int, int, int, int, int]
    q: torch.Tensor
    stores: list[tuple[torch.Tensor, torch.Tensor]]
    scales: list[KVScales | None]
    tables: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor

    @property
    def bytes_per_layer(self) -> int:
        """Keys and values that one layer must read."""
        S, length, _, G, H = self.shape
        return kv_bytes_per_token(1, G, H, self.stores[0][0].element_size()) * S * length


def make_layers(shape: tuple[int, int, int, int, int], kept_as: torch.dtype | None) -> Layers:
    """As many layers as it takes to overflow the cache."""
    S, length, N, G, H = shape
    blocks_per_row = -(-length // BLOCK_SIZE)
    num_blocks = S * blocks_per_row
    bytes_per_layer = 2 * num_blocks * BLOCK_SIZE * G * H * 2
    num_layers = min(max(_ROTATED_BYTES // bytes_per_layer, _MIN_LAYERS), _MAX_LAYERS)
    stores, all_scales = [], list[KVScales | None]()
    for _ in range(num_layers):
        keys, values = (
            torch.randn(num_blocks * BLOCK_SIZE, G, H, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        if kept_as is not None:
            kept, scales = zip(*(encode_reference(x, kept_as) for x in (keys, values)), strict=True)
            keys, values = kept
            sides = (side.view(num_blocks, BLOCK_SIZE, G).transpose(1, 2).contiguous() for side in scales)
            all_scales.append(KVScales(*sides))
        stores.append((keys, values))
    return Layers(
        shape=shape,
        q=torch.randn(S, N, H, device="cuda", dtype=torch.bfloat16),
        stores=stores,
        scales=all_scales or [None] * num_layers,
        tables=torch.randperm(num_blocks, device="cuda").to(torch.int32).view(S, blocks_per_row),
        rows=torch.arange(S, dtype=torch.int32, device="cuda"),
        lens=torch.full((S,), length, dtype=torch.int32, device="cuda"),
    )


def make_work(layers: Layers, split_len: int | None = None) -> DecodeWork:
    """Scratch memory and a list for the rows of a step."""
    S, length, N, G, H = layers.shape
    return DecodeWork(
        max_rows=S,
        max_len=max(length, 8192),
        num_heads=N,
        num_kv_heads=G,
        head_dim=H,
        device="cuda",
        split_len=split_len,
    )


def seconds_per_layer(layers: Layers, split_len: int | None, config: DecodeConfig | None) -> float:
    """Time of one layer within a step; the plan is made outside."""
    H, work = layers.shape[4], make_work(layers, split_len)
    work.plan(layers.rows, layers.lens)
    out = torch.empty_like(layers.q)

    def step() -> None:
        for (keys, values), scales in zip(layers.stores, layers.scales, strict=True):
            kv = PagedKV(keys, values, layers.tables, BLOCK_SIZE, H**-0.5, scales=scales)
            attend_decode(layers.q, kv, layers.rows, layers.lens, work, out=out, config=config)

    return seconds_of_replay(captured(step)) / len(layers.stores)


def seconds_of_cuda(layers: Layers) -> float:
    """Time of one layer through the kernel in CUDA C++."""
    H, out, work = layers.shape[4], torch.empty_like(layers.q), make_work(layers)
    work.plan(layers.rows, layers.lens)

    def step() -> None:
        for (keys, values), scales in zip(layers.stores, layers.scales, strict=True):
            kv = PagedKV(keys, values, layers.tables, BLOCK_SIZE, H**-0.5, scales=scales)
            attend_decode_cuda(layers.q, kv, work, out=out)

    return seconds_of_replay(captured(step)) / len(layers.stores)


def check_agreement(layers: Layers) -> None:
    """Both kernels on the first layer."""
    H, work = layers.shape[4], make_work(layers)
    work.plan(layers.rows, layers.lens)
    kv = PagedKV(*layers.stores[0], layers.tables, BLOCK_SIZE, H**-0.5, scales=layers.scales[0])
    triton = attend_decode(layers.q, kv, layers.rows, layers.lens, work)
    cuda = attend_decode_cuda(layers.q, kv, work)
    torch.testing.assert_close(cuda, triton, rtol=2e-2, atol=2e-2)


def seconds_of_plan(layers: Layers) -> float:
    """Time of the work list of one step."""
    work = make_work(layers)

    def plans() -> None:
        for _ in range(10):
            work.plan(layers.rows, layers.lens)

    return seconds_of_replay(captured(plans)) / 10


def sweep(layers: Layers, ceiling: float, deadline: float) -> None:
    """Coordinate descent from the default: vary one option at a time until time is up."""
    head_bytes = layers.shape[4] * 2
    best: dict[str, int] = {"split_len": 256, "block_n": 16384 // head_bytes}
    best |= {"num_warps": 4, "num_stages": 3, "programs_per_sm": 3}
    options = {
        "split_len": (32, 64, 128, 256, 512, 1024),
        "block_n": (32, 64, 128),
        "programs_per_sm": (1, 2, 3, 4, 6),
        "num_stages": (2, 3, 4, 5),
        "num_warps": (2, 4, 8),
    }
    times: dict[tuple[int, ...], float] = {}

    def time_of(choice: dict[str, int]) -> float:
        key = tuple(choice.values())
        if key not in times:
            config = DecodeConfig(*(choice[name] for name in DecodeConfig.__slots__))
            try:
                times[key] = seconds_per_layer(layers, choice["split_len"], config)
            except Exception as error:  # too much shared memory, mostly: an answer, too
                print(f"    {choice}: {str(error).splitlines()[0][:80]}")
                times[key] = float("inf")
        return times[key]

    for name, value in [(name, value) for name, values in options.items() for value in values]:
        if time.monotonic() > deadline:
            break
        if time_of(best | {name: value}) < time_of(best):
            best[name] = value
    print(f"    {len(times)} tried; the five best:")
    for key, seconds in sorted(times.items(), key=lambda item: item[1])[:5]:
        share = layers.bytes_per_layer / seconds / ceiling
        print(f"    {seconds * 1e6:8.2f} us  {share:6.1%}  {dict(zip(best, key, strict=True))}")


def main(argv: list[str] | None = None) -> int:
    """Parse the flags, measure, print."""
    parser = argparse.ArgumentParser(description="time attention of decoding rows")
    parser.add_argument("--sweep", action="store_true", help="try the compile and launch options")
    parser.add_argument("--shape", action="append", help="S,len,N,G,H; may be repeated")
    parser.add_argument("--seconds", type=float, default=80.0, help="time for the sweep of all shapes")
    parser.add_argument("--kv", choices=("fp8", "int8"), help="keys and values of 8 bits")
    arguments = parser.parse_args(argv)
    kept_as = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(arguments.kv or "")
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    chosen = [tuple(int(part) for part in shape.split(",")) for shape in arguments.shape or ()]
    began = time.monotonic()
    ceiling = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, a kernel that only reads: {ceiling / 1e12:.2f} TB/s")
    shapes = chosen or SHAPES
    for index, (S, length, N, G, H) in enumerate(shapes):
        layers = make_layers((S, length, N, G, H), kept_as)
        check_agreement(layers)
        rows = (
            (
                "triton",
                seconds_per_layer(layers, None, None),
                f"plan {seconds_of_plan(layers) * 1e6:5.2f} us",
            ),
            ("cuda", seconds_of_cuda(layers), ""),
        )
        for name, seconds, note in rows:
            rate = layers.bytes_per_layer / seconds
            print(
                f"S {S:4} len {length:5} N {N:3} G {G:2} H {H:3}  {name:6} {seconds * 1e6:8.2f} us  "
                f"{rate / 1e12:5.2f} TB/s  {rate / ceiling:6.1%} of reading   {note}",
                flush=True,
            )
        if arguments.sweep:
            sweep(layers, ceiling, began + arguments.seconds * (index + 1) / len(shapes))
    return 0


if __name__ == "__main__":
    sys.exit(main())

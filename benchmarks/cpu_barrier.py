"""What sharing one operation between the threads of the C pool costs: `python -m benchmarks.cpu_barrier`.

A decode step of a small model is hundreds of operations of some microseconds each, and every one of them ends
when its last chunk is done. So what a step pays beside its arithmetic is, for each operation: publish it, let
the workers find it, wait for the last one. Here the chunks of an operation take a chosen time (a loop that
looks at the clock). For each time a line says how many microseconds an operation takes with one thread, with
all, and what lies beyond an even split: the barrier. Figures are medians: other programs interrupt some.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import infer.kernels.cpu

SOURCE = r"""
#include "threads.c"
#include <string.h>

static void busy(const void *given, int64_t chunk) {
    const int64_t *args = given;
    (void)chunk;
    for (int64_t end = now() + args[1]; args[1] && now() < end;) relax();
}

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The median nanoseconds of an operation of `chunks` chunks, of `each` nanoseconds. */
int64_t median_operation(int64_t chunks, int64_t each, int64_t *times, int64_t count) {
    int64_t args[2] = {0, each};
    for (int64_t i = 0; i < count; i++) {
        int64_t start = now();
        infer_run_one(busy, chunks, args);
        times[i] = now() - start;
    }
    qsort(times, (size_t)count, sizeof *times, ascending);
    return times[count / 2];
}
"""
CHUNKS_PER_THREAD = 4
COUNT = 20_000


def build(directory: Path) -> ctypes.CDLL:
    """Compile the pool with the operations above."""
    source, library = directory / "barrier.c", directory / "barrier.so"
    source.write_text(SOURCE)
    pool = Path(infer.kernels.cpu.__file__).parent / "csrc"
    flags = ["-O2", "-shared", "-fPIC", "-pthread", f"-I{pool}"]
    if platform.machine() == "x86_64":
        flags.append("-march=native")
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    built = ctypes.CDLL(str(library))
    built.median_operation.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p, ctypes.c_int64]
    built.median_operation.restype = built.infer_set_threads.restype = ctypes.c_int64
    built.infer_set_threads.argtypes = [ctypes.c_int64]
    return built


def main() -> None:
    """Print a line for each length of a chunk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    threads = parser.parse_args().threads
    times = (ctypes.c_int64 * COUNT)()
    with tempfile.TemporaryDirectory() as directory:
        built = build(Path(directory))
        chunks = CHUNKS_PER_THREAD * threads
        print(
            f"{threads} threads, {chunks} chunks, {platform.machine()}; microseconds per operation, medians"
        )
        print("chunk   1 thread    all   beyond an even split")
        for each in (0, 250, 1000, 4000, 16000):
            count = COUNT if each < 4000 else COUNT // 10
            found = []
            for number in (1, threads):
                built.infer_set_threads(number)
                found.append(built.median_operation(chunks, each, times, count) / 1e3)
            alone, shared = found
            print(
                f"{each / 1e3:5.2f} {alone:10.2f} {shared:6.2f} {shared - alone / threads:8.2f}", flush=True
            )
        built.infer_set_threads(1)


if __name__ == "__main__":
    main()

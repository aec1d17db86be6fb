"""What the books of the KV cache cost, in microseconds per operation.

    python -m benchmarks.cache_books [--block-size 16] [--repeats 5]

No model and no tensors: these are the integer operations that the scheduler waits for on every step.
Each figure is CPU time, the best of `--repeats` runs: everything that disturbs a run makes it slower.
The two rows to watch are `decode step`: reserve and commit for every running sequence, with no block
boundary crossed, and the same averaged over all steps, one in `block_size` of which crosses one.
"""

from __future__ import annotations

import argparse
import platform
import time
from array import array
from collections.abc import Callable

from infer.cache.block_allocator import BlockAllocator
from infer.cache.paged_pool import PagedKVCachePool

LONG_PROMPT_LEN = 32768


def best_us(
    work: Callable[[], object], repeats: int, *, prepare: Callable[[], object] = lambda: None
) -> float:
    """The shortest of `repeats` runs of `work`, each after `prepare`, in microseconds."""
    best = float("inf")
    for _ in range(repeats):
        prepare()
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best * 1e6


def measure_allocator(repeats: int) -> list[tuple[str, float]]:
    """Take and drop, one block at a time and many at once."""
    allocator = BlockAllocator(4096)

    def one_by_one() -> None:
        for _ in range(1000):
            allocator.drop(allocator.take(1, 7), 7)

    def in_bulk() -> None:
        allocator.drop(allocator.take(2048, 7), 7)

    return [
        ("take + drop of one block", best_us(one_by_one, repeats) / 1000),
        ("take + drop, per block of 2048", best_us(in_bulk, repeats) / 2048),
    ]


def measure_decode(block_size: int, repeats: int, num_running: int) -> list[tuple[str, float]]:
    """Reserve and commit for every running sequence of a step."""
    pool = PagedKVCachePool(num_running * 40, block_size)
    tokens = {seq_id: array("I", [seq_id]) * (30 * block_size) for seq_id in range(num_running)}
    lengths = dict.fromkeys(tokens, 0)

    def step() -> None:
        for seq_id, sequence in tokens.items():
            num_tokens = lengths[seq_id] = lengths[seq_id] + 1
            pool.reserve(seq_id, num_tokens, num_tokens - 1)
            pool.commit(seq_id, sequence, num_tokens)

    def restart() -> None:
        for seq_id in tokens:
            pool.release(seq_id)
            pool.match_prefix(seq_id, [])
            lengths[seq_id] = 0
        pool.reset_prefix_cache()
        for seq_id in tokens:
            pool.release(seq_id)
            pool.match_prefix(seq_id, [])
        step()  # takes the first block

    def steps_within_a_block() -> None:
        for _ in range(block_size - 2):
            step()

    def steps_over_many_blocks() -> None:
        for _ in range(20 * block_size):
            step()

    within = best_us(steps_within_a_block, repeats, prepare=restart) / max(1, block_size - 2)
    average = best_us(steps_over_many_blocks, repeats, prepare=restart) / (20 * block_size)
    return [
        (f"decode step, {num_running} sequences, no boundary", within),
        ("    per sequence", within / num_running),
        (f"decode step, {num_running} sequences, average", average),
        ("    per sequence", average / num_running),
    ]


def measure_prefixes(block_size: int, repeats: int) -> list[tuple[str, float]]:
    """A long prompt through its whole life: computed, found again, let go, evicted."""
    num_blocks = LONG_PROMPT_LEN // block_size
    pool = PagedKVCachePool(num_blocks + 1, block_size)
    tokens = array("I", [token * 7919 % 150_000 for token in range(LONG_PROMPT_LEN)])

    def enter(seq_id: int) -> Callable[[], object]:
        return lambda: pool.match_prefix(seq_id, tokens)

    def reenter() -> None:
        pool.release(2)
        pool.match_prefix(2, tokens)

    def restart() -> None:
        pool.release(1)
        pool.reset_prefix_cache()
        pool.match_prefix(1, tokens)
        pool.reserve(1, len(tokens), 0)

    insert = best_us(lambda: pool.commit(1, tokens, len(tokens)), repeats, prepare=restart)
    pool.release(1)
    walk = best_us(lambda: pool.tree.match(tokens), repeats)
    match = best_us(enter(2), repeats, prepare=lambda: pool.release(2))
    release = best_us(lambda: pool.release(2), repeats, prepare=reenter)
    pool.release(2)
    eviction = best_us(lambda: pool.tree.evict(num_blocks), 1)
    miss = best_us(enter(3), repeats, prepare=lambda: pool.release(3))
    return [
        (f"walk of {LONG_PROMPT_LEN} cached tokens", walk),
        ("    per block", walk / num_blocks),
        (f"match_prefix, {LONG_PROMPT_LEN} cached tokens", match),
        ("    per block", match / num_blocks),
        ("match_prefix, nothing cached", miss),
        (f"commit of {num_blocks} new blocks at once", insert),
        ("    per block", insert / num_blocks),
        (f"release of {num_blocks} blocks", release),
        ("    per block", release / num_blocks),
        ("evict, per block", eviction / num_blocks),
    ]


def main() -> None:
    """Print the figures as a table."""
    parser = argparse.ArgumentParser(description="microseconds per operation of the KV cache's books")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"python {platform.python_version()}, {platform.processor() or platform.machine()}, ", end="")
    print(f"block_size {args.block_size}, best of {args.repeats}\n")
    rows = measure_allocator(args.repeats)
    for num_running in (64, 256):
        rows += measure_decode(args.block_size, args.repeats, num_running)
    rows += measure_prefixes(args.block_size, args.repeats)
    for name, us in rows:
        print(f"{name:<48} {us:>10.3f} us")


if __name__ == "__main__":
    main()

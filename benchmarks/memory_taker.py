"""A process that takes and frees memory beside a server: the neighbour of `benchmarks.soak_server`.

    python -m benchmarks.memory_taker --device cuda --most-gib 150 --seed 0

Every few seconds it holds another amount, half of the time all that it may hold: at most `--most-gib`, and
on a GPU what is free there less the bytes that the last line of stdin wants left (at first 0). Each line of
stdin is obeyed at once and answered with the bytes held from then on; the end of stdin ends the process.
What is held is written to, so that a host has to find the pages.
"""

from __future__ import annotations

import argparse
import random
import select
import subprocess
import sys
from types import TracebackType

import torch

GIB, SMALLEST = 2**30, 2 * 2**20
LONGEST_S = 3.0  # between two amounts


class Holder:
    """Pieces of memory of a device."""

    def __init__(self, device: str, most: int, seed: int) -> None:
        self.device, self.most = torch.device(device), most
        self.leaves = 0
        self.num_changes = self.most_held = 0
        self._pieces: list[torch.Tensor] = []
        self._rng = random.Random(seed)

    @property
    def held(self) -> int:
        """The bytes held now."""
        return sum(map(len, self._pieces))

    def change(self) -> None:
        """Hold another amount."""
        share = 1.0 if self._rng.random() < 0.5 else self._rng.random()
        self._hold(int(share * min(self.most, max(0, self._free() + self.held - self.leaves))))
        self.num_changes += 1
        self.most_held = max(self.most_held, self.held)

    def _free(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return self.most  # the kernel ends processes where a host has no more: the limit is all that is taken

    def _hold(self, num_bytes: int) -> None:
        """Free what is too much, or take pieces of falling size until nothing smaller is given."""
        while self.held > num_bytes:
            self._pieces.pop()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        size = GIB
        while size >= SMALLEST:
            if self.held + size > num_bytes:
                size //= 2
                continue
            try:
                self._pieces.append(torch.ones(size, dtype=torch.uint8, device=self.device))
            except torch.OutOfMemoryError:
                size //= 2


class Neighbour:
    """The process, seen from the server's side; with `most_gib` 0 there is none."""

    def __init__(self, device: str, most_gib: float, seed: int) -> None:
        self.summary = "none"
        self._process: subprocess.Popen[str] | None = None
        self._arguments = ["--device", device, "--most-gib", str(most_gib), "--seed", str(seed)]
        self._is_asked_for = most_gib > 0

    def __enter__(self) -> Neighbour:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to take memory."""
        if self._is_asked_for:
            command = [sys.executable, "-m", "benchmarks.memory_taker", *self._arguments]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def leave(self, num_bytes: int) -> None:
        """Have so much left free from now on; returns when it is."""
        if self._process is not None:
            assert self._process.stdin is not None and self._process.stdout is not None
            print(num_bytes, file=self._process.stdin, flush=True)
            if not self._process.stdout.readline():
                raise SystemExit("the neighbour that takes memory has died")

    def stop(self) -> None:
        """End it, and keep what it says in the end."""
        if self._process is not None:
            self.summary = self._process.communicate(timeout=60)[0].strip() or "it has died"
            self._process = None


def main() -> int:
    """Take and free until stdin ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most-gib", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    holder = Holder(args.device, int(args.most_gib * GIB), args.seed)
    rng = random.Random(f"pauses {args.seed}")
    while True:
        if select.select([sys.stdin], [], [], rng.uniform(0.2, LONGEST_S))[0]:
            line = sys.stdin.readline()
            if not line:
                break
            holder.leaves = int(line)
            holder.change()
            print(holder.held, flush=True)
        else:
            holder.change()
    print(f"{holder.num_changes} amounts, the largest {holder.most_held / GIB:.1f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

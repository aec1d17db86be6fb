"""A replica's process whose code prints more than a pipe holds."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.stdin.readline()
    print("loaded 50 %", end="", file=sys.stderr, flush=True)  # a progress bar, in the same pipe
    print("replica ready: http://127.0.0.1:1", flush=True)
    print("\n".join(["a line of a package"] * 20_000), flush=True)
    sys.exit(7)

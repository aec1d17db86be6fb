"""Every idea switched on after the other, and what each is worth here: both tables of ideas.

    python -m benchmarks.run_matrix [--out FILE] [--png FILE] [options of benchmarks.bench matrix]

Without --model or --model-config a tiny model of random weights is used, which takes a few minutes on two
cores. The policies are compared after it, on a simulated machine.
"""

from __future__ import annotations

import sys

from benchmarks.bench import run

if __name__ == "__main__":
    raise SystemExit(run(["matrix", *sys.argv[1:]]) or run(["policies"]))

"""Every idea switched on after the other, and what each is worth here: a door to `infer bench matrix`.

    python -m benchmarks.run_matrix [--out FILE] [--png FILE] [options of infer bench matrix]

Without --model or --model-config a tiny model of random weights is used, which takes a few minutes on two
cores. The policies are compared after it, on a simulated machine.
"""

from __future__ import annotations

import sys

from infer.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "matrix"]  # a report holds the command it was made with
    raise SystemExit(main() or main(["bench", "policies"]))

"""`python -m infer.server ...` is `infer serve ...`."""

from __future__ import annotations

import sys

from infer.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main(["serve", *sys.argv[1:]]))

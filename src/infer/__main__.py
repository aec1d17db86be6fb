"""`python -m infer` is the command `infer`."""

from __future__ import annotations

from infer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

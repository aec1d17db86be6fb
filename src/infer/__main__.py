"""`python -m infer`, and the command `infer`: the door, which opens before there is anything behind it.

Importing the command line takes a good part of a second, and people press Ctrl-C in it. So what is
imported here is imported inside the `try` that turns an interruption into its exit code.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `infer` with these arguments (default: those of the process) and return its exit code."""
    try:
        from infer.cli.main import main as run

        return run(argv)
    except KeyboardInterrupt:  # before or after what cli/main.py looks at
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())

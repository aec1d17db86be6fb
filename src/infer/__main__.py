"""`python -m infer`, and the command `infer`: the entry point, which starts before anything is imported.

Importing the command line takes a good part of a second, and people press Ctrl-C during it. An exception
raised in the middle of an import may surface as a different one, so until the import is done Ctrl-C ends the
process, which has nothing to clean up yet.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # not from typing: Ctrl-C can still interrupt the imports of this file and the package
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `infer` with these arguments (default: the process's own) and return its exit code."""
    try:
        import signal  # inside: it imports enum and more, 8 ms in which Ctrl-C raises

        # False if the parent process ignores SIGINT, or handles it outside Python
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if is_ours:
            signal.signal(signal.SIGINT, _leave)
        from infer.cli.main import main as run

        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(argv)
    except KeyboardInterrupt:  # before or after the part that cli/main.py handles
        return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    raise SystemExit(main())

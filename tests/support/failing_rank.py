"""A rank that fails while it loads: `python -m tests.support.failing_rank`, in place of a rank's process."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from infer.client import load, rank_process


def load_nothing(*_: Any, **__: Any) -> NoReturn:
    """Fail as a bug would."""
    raise RuntimeError("no luck with this part")


if __name__ == "__main__":
    load.load_part = load_nothing
    sys.exit(rank_process.main())

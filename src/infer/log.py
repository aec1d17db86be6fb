"""Log lines and progress bars: everything written that is not the answer.

Standard output belongs to the generated text, so that `infer generate ... > file` holds the text and
nothing else. Everything written here goes to standard error:

    stdout   the answer
    stderr   log lines (warnings only, unless --log-level says more), progress bars, notices

A library must not configure its host's logging, so `import infer` does not; the command line calls
`setup_logging` once. A module logs with `logger = logging.getLogger(__name__)`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str) -> None:
    """Send this package's log lines of this level and above to standard error."""
    assert level in LEVELS, f"level must be one of {LEVELS}, got {level!r}"
    logger = logging.getLogger("infer")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


@contextmanager
def progress(
    label: str, total: float | None, *, is_shown: bool = True, counts_bytes: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show a bar on standard error while the block runs; yields `advance(amount)`.

    Nothing is drawn when `is_shown` is false or standard error is not a terminal. The bar clears
    itself at the end: a finished download is not part of the answer.
    """
    if not is_shown or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column

    name = bars.TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=2))
    bar = bars.BarColumn(bar_width=None, table_column=Column(ratio=1))  # both as wide as the line allows
    columns: list[bars.ProgressColumn] = [name, bar, bars.TimeElapsedColumn()]
    if total is not None:
        done = bars.DownloadColumn() if counts_bytes else bars.MofNCompleteColumn()
        columns = [name, bar, done, bars.TimeRemainingColumn()]
    with bars.Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as display:
        task = display.add_task(label, total=total)
        yield lambda amount: display.advance(task, amount)

"""A rank as a process of its own: `python -m infer.client.rank_process`, started by `rank_group.py`.

It loads its part of the weights and then handles the messages of rank 0 (engine/rank_worker.py). Its standard
error is the engine's, so a failure is logged here, once, with its traceback; rank 0 gets one line through a
pipe. If its GPU fails, the process exits at once, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from functools import partial

import msgspec

from infer.client.imports import quick_imports
from infer.client.messages import DONE, RankLaunch, to_failure
from infer.client.spawn import EXIT_ORPHANED, take_orders
from infer.errors import DeviceLost, InferError, RanksEnded
from infer.log import setup_logging

EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def main() -> int:
    """Run a rank from the first line of input until it ends; returns the exit code."""
    parent = os.getppid()
    _end_with_parent(parent)
    launch = take_orders(RankLaunch)
    setup_logging(launch.log_level)
    try:
        _serve(launch)
    except BaseException as error:
        if isinstance(error, RanksEnded):  # another rank is gone, and rank 0 reports that
            return EXIT_FAILED
        if isinstance(error, DeviceLost) or not isinstance(error, InferError):
            logger.exception("rank %d failed", launch.rank)
        _report_failure(launch.report, error)
        return EXIT_FAILED
    return 0


def _serve(launch: RankLaunch) -> None:
    with quick_imports():
        from infer.client.load import load_part, use_threads
        from infer.engine.rank_worker import open_link, serve_rank, watch_device
        from infer.loader.find.source import resolve_model
        from infer.loader.headers import read_headers

    use_threads(launch.num_threads)
    config = launch.config
    link = open_link(launch.memory, launch.rank, config.load.num_ranks, config.load.pipeline_parallel_size)
    source = resolve_model(config.load.model, revision=config.load.revision, show_progress=False)
    loaded = load_part(config, read_headers(source), launch.rank)
    watched = loaded.device, partial(_end_at_once, launch)
    threading.Thread(target=watch_device, args=watched, name="infer-device-watch", daemon=True).start()
    serve_rank(loaded, link, lambda: _report_done(launch.report))


def _end_at_once(launch: RankLaunch, error: DeviceLost) -> None:
    """Exit and report the reason: other threads may wait for the GPU forever."""
    logger.error("rank %d failed: %s", launch.rank, error)
    _report_failure(launch.report, error)
    os._exit(EXIT_FAILED)


def _report_failure(pipe: int, error: BaseException) -> None:
    os.write(pipe, msgspec.json.encode(to_failure(error)) + b"\n")


def _report_done(pipe: int) -> None:
    os.write(pipe, DONE + b"\n")


def _end_with_parent(parent: int) -> None:
    """Have the operating system kill this process when its parent dies, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())

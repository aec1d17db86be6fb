"""The engine process: `python -m infer.client.process`, started by `supervisor.py`.

HTTP, JSON and detokenizing must not share an interpreter with the loop that feeds the device. So the
scheduler and the model live here.

    start    import PyTorch, and meanwhile read one line of JSON from standard input (`Launch`); load the
             model, compile and capture everything that steps may need, send `Ready`
    loop     serve commands until `Stop` (engine_server.py)
    end      at `Stop`, or when standard input closes because the server is gone

The server keeps its end of standard input open as long as it lives. Only the server handles Ctrl-C and
SIGTERM: a signal to the whole group must not end the engine before requests have drained.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from infer.client import messages
from infer.client.engine_server import EngineServer
from infer.client.imports import quick_imports
from infer.client.placement import take_place
from infer.client.process_limits import spell_shortage
from infer.client.spawn import take_orders
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.engine.gc_freeze import freeze
from infer.engine.observer import EngineObserver
from infer.engine.phases import Phases
from infer.errors import ConfigError, DeviceLost, EngineError, InferError
from infer.loader.find.source import resolve_model
from infer.log import setup_logging
from infer.tools.record import Recorder, RecordFile, TraceRecorder
from infer.tools.record_files import set_aside

logger = logging.getLogger(__name__)

LINGER_MS = 2000  # time for the last message to reach the server
EXIT_FAILED = 1


def open_recorder(orders: messages.RecordOrders) -> RecordFile | None:
    """Return the recorder of a run, after setting aside the record of a previous engine.

    None: the file cannot be written, and the engine serves without a record.
    """
    path = Path(orders.path)
    try:
        set_aside(path)
        return (Recorder if orders.has_text else TraceRecorder)(path, max_bytes=orders.max_bytes)
    except (OSError, ConfigError) as error:
        logger.warning("no record is written: %s; the engine continues without one", error)
        return None


def load_engine(config: EngineConfig, observer: EngineObserver | None = None) -> Engine:
    """Find the model, load it and build its engine; the server handles text."""
    phases = Phases()
    with phases("import"):  # imported here: a test's engine has no model and needs no torch
        from infer.client.load import load_weights
        from infer.engine.build import build_engine, token_bytes_of, wake_libraries
        from infer.loader.headers import read_headers

    with phases("find"):
        source = resolve_model(config.load.model, revision=config.load.revision, show_progress=False)
        headers = read_headers(source, config.load.model_impl)
    token_bytes = token_bytes_of(source, config.load.tokenizer, headers.config, headers.eos_ids, headers)
    with phases("load weights"):
        given = config, token_bytes
        threading.Thread(target=wake_libraries, args=given, name="infer-wake", daemon=True).start()
        loaded = load_weights(config, headers)
    engine = build_engine(config, loaded, observer=observer, phases=phases, token_bytes=token_bytes)
    if loaded.ranks is None and not config.adapters.is_on:
        engine.remake = partial(build_engine, config, loaded, observer=observer, token_bytes=token_bytes)
    return engine


def main(make_engine: Callable[..., Engine] = load_engine) -> int:
    """Run the engine process from the first line of input until it ends; returns the exit code."""
    launch = take_orders(messages.Launch, on_orphaned=_remove_directory)
    spawn_s = time.perf_counter() - (launch.spawned_at or time.perf_counter())
    setup_logging(launch.log_level)
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(context.socket(zmq.PAIR)) for _ in launch.endpoints]
        for socket, endpoint in zip(sockets, launch.endpoints, strict=True):
            socket.set_hwm(0)  # messages in flight are bounded by max_tokens of the requests being served
            socket.linger = LINGER_MS
            socket.connect(endpoint)
        kind: type[InferError] = ConfigError  # the kind of error if memory or files run out while loading
        try:
            recorder = None if launch.record is None else open_recorder(launch.record)
            if launch.record is not None:
                make_engine = partial(make_engine, observer=recorder)
            engine = make_engine(take_place(launch.config, launch.replica))
            if isinstance(recorder, Recorder):
                recorder.goes_on = engine.remake is not None
            set_up = partial(_set_up, launch)
            set_up(engine)
            with engine.phases("capture"):
                while engine.prepare():
                    pass
            freeze()  # the model lives as long as the process, or until the engine sleeps
            phases = {"spawn": spawn_s, **engine.phases}
            served = engine.family, engine.context_len, engine.model_len
            max_queue = engine.scheduler.config.max_queue
            ready = messages.encode(messages.Ready(engine.stats(), *served, phases, max_queue))
            for socket in sockets:
                socket.send(ready)
            kind = EngineError
            server = EngineServer(engine, sockets, set_up, recorder)
            del engine  # it may be freed while it sleeps
            server.run()
        except BaseException as error:
            shortage = spell_shortage(error)
            if shortage is None and (type(error) is DeviceLost or not isinstance(error, InferError)):
                logger.exception("engine process died")
            failure = messages.to_failure(error if shortage is None else kind(shortage))
            for socket in sockets:
                socket.send(messages.encode(failure))
            return EXIT_FAILED
    return 0


def _set_up(launch: messages.Launch, engine: Engine) -> None:
    """Make an engine collect what the server will ask for."""
    engine.keep_stories(launch.num_stories)
    if launch.replica.count > 1:
        engine.watch_prefixes()


def _remove_directory(launch: messages.Launch) -> None:
    """Remove the directory of the sockets, unless the server has already removed it."""
    shutil.rmtree(Path(launch.endpoints[0].removeprefix("ipc://")).parent, ignore_errors=True)


def import_engine() -> None:
    """Import what `load_engine` will need, while the server is not yet ready to send orders."""
    with quick_imports():
        from infer.client import load  # noqa: F401
        from infer.engine import build  # noqa: F401


def wake_gpu() -> None:
    """Initialise the GPU's driver, if there is one, during the imports: PyTorch would otherwise wait for it.

    Then let Triton compute its cache key, which takes half a second because it reads its whole library.
    """
    with contextlib.suppress(OSError, ImportError):
        if ctypes.CDLL("libcuda.so.1").cuInit(0) == 0:
            from triton.runtime.cache import triton_key

            triton_key()


if __name__ == "__main__":
    for work in (wake_gpu, import_engine):
        threading.Thread(target=work, name="infer-import", daemon=True).start()
    sys.exit(main())

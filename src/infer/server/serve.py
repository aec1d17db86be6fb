"""The life of a server process.

    bind ──► answer 503 "starting" ──► models load ──► ready ──► signal ──► drain ──► close ──► exit 0

The port is bound before models are loaded, so that a second server on it fails at once instead of after a
minute, and a health check sees "starting" instead of a refused connection. Only a model that cannot be found
is rejected even earlier, because a server that will never be ready should not listen. Settings that the
device does not support are rejected by the first engine, because this process does not import torch.

After SIGTERM, Ctrl-C or a hang-up of its terminal (SIGHUP), new requests get 503. Running requests have
`drain_timeout` seconds to finish and are then cut off with an error; a second signal cuts them off at once,
and the server exits within two seconds. If a model cannot be loaded, the server exits with that error, and if
every engine is down for good, it exits with `EngineLost`, so that a service manager can restart it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from starlette.types import ASGIApp

from infer.client.placement import is_on_gpu
from infer.client.spawn import SpareEngines
from infer.client.supervisor import remove_directories, remove_stale_directories
from infer.config.server import ServerConfig, is_loopback
from infer.config.settings import EngineConfig
from infer.errors import ConfigError, EngineLost
from infer.server.app import build_app
from infer.server.connection import GuardedConnection
from infer.server.fleet.fleet import Fleet, with_server_defaults
from infer.server.metrics import ServerMetrics
from infer.server.middleware.forward import Ask, Forwarded
from infer.server.middleware.host_check import needs_host_check
from infer.server.processes import messages
from infer.server.processes.accept import Acceptor
from infer.server.processes.board import Board
from infer.server.processes.workers import Workers, num_processes
from infer.server.state import ServerState
from infer.server.tls import tls_context, warn_if_expired

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BACKLOG = 2048
CUT_OFF_S = 2  # seconds from a second signal to the exit, to send open streams an error
LAST_WRITES_S = 5  # seconds for clients to read finished responses
KEEP_ALIVE_S = 30  # longer than the usual pause between two requests of a conversation
_IMPORTED_AT = time.perf_counter()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers (`serve` decides when to stop), on a socket shared by processes."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, board: Board) -> None:
        super().__init__(config)
        self._listener, self._board = listener, board

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup([])
        make = partial(_CountedConnection, self._board, self.config, self.server_state, self.lifespan.state)
        self._acceptor = Acceptor(self._listener, self._board, make, self.config.ssl)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and let clients read the last responses."""
        self._acceptor.close()
        self._listener.close()
        await super().shutdown([])


class _CountedConnection(GuardedConnection):
    """A connection that is counted on the board of all API processes until it is lost."""

    def __init__(self, board: Board, *args: Any) -> None:
        super().__init__(*args)
        self._board = board

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove it from the board."""
        self._board.count_connection(-1)
        super().connection_lost(exc)


async def serve(
    models: Mapping[str, EngineConfig],
    config: ServerConfig,
    *,
    announce: Callable[[str], None],
    spares: SpareEngines | None = None,
) -> None:
    """Serve these models until a signal arrives; `announce` gets the URL once requests are accepted.

    `spares` are engine processes that are already started.
    """
    number = num_processes(config, on_gpu=all(map(is_on_gpu, models.values())))
    state = ServerState(config=config, board=Board(number))
    state.board.is_starting = True
    workers = Workers(config, state.board)
    fleet = Fleet(state, ServerMetrics(config.metrics_prefix), spares, workers)
    http = uvicorn_config(state, fleet)  # first: if it fails, there is nothing to clean up
    listener = bind(config)
    try:
        fleet.check(models)
    except ConfigError:
        listener.close()
        remove_socket(config)
        raise
    server = HttpServer(http, listener, state.board)
    warn_if_open(config)
    warn_if_expired(config)
    remove_stale_directories()
    stopping = stop_on_signals(state)
    first = [] if config.on_demand else [with_server_defaults(model) for model in models.values()]
    answer = partial(_answer_process, Forwarded(http.loaded_app), state)
    await workers.start(answer, listener, first)
    serving = asyncio.create_task(server.serve())
    starting = asyncio.create_task(fleet.start(models))
    ends: set[asyncio.Future[Any]] = {stopping, serving, workers.lost}
    url = url_of(config, listener)
    _log_listening(url, len(models), number)
    try:
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        _raise_if_lost(workers)
        if starting.done():
            starting.result()  # raises the error of a failed start
            gc.collect()
            gc.freeze()  # startup objects stay: collections between two tokens need not scan them
            announce(url)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            _raise_if_lost(workers)
            await fleet.end_loads()  # a model that no one will use
            await drain(state, config.drain_timeout)
            _raise_if_lost(workers)
    finally:
        state.board.is_draining = True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await fleet.close()  # requests inside get `EngineStopped`
        server.should_exit = True
        await asyncio.gather(serving, workers.close())
        stopping.cancel()
        remove_socket(config)
    if state.is_cut_off:
        _exit(config)
    logger.info("stopped")


def _answer_process(forwarded: Forwarded, state: ServerState, message: messages.ToFirst) -> Awaitable[Any]:
    """Answer a message from another API process."""
    match message:
        case messages.ForwardRequest() | messages.ClientLeft():
            return forwarded.answer(message)
        case messages.LoadOnDemand(name):
            assert state.demand is not None
            return state.demand(name)
        case messages.PutResponse(owner, response_id, stored):
            return state.responses.put(owner, response_id, stored)
        case messages.GetResponse(owner, response_id):
            return state.responses.get(owner, response_id)
        case messages.DeleteResponse(owner, response_id):
            return state.responses.delete(owner, response_id)


def _raise_if_lost(workers: Workers) -> None:
    if workers.lost.done():
        raise EngineLost(workers.lost.result())


async def drain(state: ServerState, timeout_s: float) -> None:
    """Reject new requests, and wait at most `timeout_s` seconds until the running ones have finished."""
    board = state.board
    board.is_draining = True
    hint = "; a second signal (Ctrl-C) ends them at once" if board.num_active else ""
    logger.info("draining requests=%d timeout_s=%g%s", board.num_active, timeout_s, hint)
    give_up_at = time.monotonic() + timeout_s
    while board.num_active and time.monotonic() < give_up_at and not state.is_cut_off:
        await asyncio.sleep(0.02)
    if board.num_active and not state.is_cut_off:
        logger.warning("drain timed out cut_off_requests=%d", board.num_active)


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket; raises `ConfigError` with the reason if it cannot listen."""
    where, advice = f"{config.host}:{config.port}", "choose another --port or --host"
    if config.uds is not None:
        where, advice = config.uds, "choose another --uds"
    try:
        return _listen(config)
    except OSError as error:
        reason = error.strerror or str(error)
        if config.uds is not None and error.errno == errno.EADDRINUSE:
            is_socket = Path(config.uds).is_socket()
            reason = "another server listens there" if is_socket else "there is a file that is not a socket"
        raise ConfigError(f"cannot listen on {where}: {reason}; {advice}") from None


def remove_socket(config: ServerConfig) -> None:
    """Remove the file of a listening unix socket, if there is one."""
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def warn_if_open(config: ServerConfig) -> None:
    """Log a warning if anyone on the network can use this server."""
    if config.uds is None and not config.api_key and not is_loopback(config.host):
        logger.warning("server open to the network without a key host=%s (see --api-key)", config.host)


def _listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket; at a path, only for this user, replacing the file of a dead server."""
    path, family = config.uds, socket.AF_UNIX
    address: Any = path
    if path is None:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if path is not None and Path(path).is_socket() and not _is_answered(path):
            os.unlink(path)
        listener.bind(address)
        if path is not None:
            os.chmod(path, 0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def url_of(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL for clients."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.tls_cert else 'http'}://{shown}:{port}"


def uvicorn_config(state: ServerState, fleet: Fleet, *, ask: Ask | None = None) -> uvicorn.Config:
    """Return uvicorn's settings with our application; `ask` as in `build_app`."""
    config = state.config
    app = build_app(state, fleet, check_host=needs_host_check(config), ask=ask)
    for route in app.routes:  # builds each route lazily: the first request need not wait
        route.matches({"type": "http", "method": "GET", "path": "/-", "root_path": "", "headers": []})
    return http_config(app, config)


def http_config(app: ASGIApp, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's settings for any application."""
    made = uvicorn.Config(
        app,
        http=GuardedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WRITES_S,
        backlog=BACKLOG,
    )
    made.load()
    made.ssl = tls_context(config)  # uvicorn would ask for a passphrase and allow old ciphers
    return made


def stop_on_signals(state: ServerState) -> asyncio.Future[None]:
    """Return a future that is done at the first SIGINT, SIGTERM or SIGHUP; a second one cuts requests off.

    A third one ends the process. A terminal that closes may send SIGHUP twice, so SIGHUP counts only as the
    first signal; under nohup it is ignored.
    """
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if stopping.done():
            if state.is_cut_off:
                _exit(state.config)
            logger.warning("second signal ended_requests=%d", state.board.num_active)
            state.is_cut_off = True
            loop.call_later(CUT_OFF_S if state.board.num_active else 0, _exit, state.config)
            return
        stopping.set_result(None)

    def on_hang_up() -> None:
        if not stopping.done():
            stopping.set_result(None)

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, on_hang_up)
    return stopping


def _exit(config: ServerConfig) -> NoReturn:
    """Exit without closing anything; engine processes notice that and exit, too."""
    remove_directories()
    remove_socket(config)
    logger.info("stopped")
    os._exit(130)


def _process_age() -> float:
    """Return the seconds since this process started, or, if unknown, since this module was imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.perf_counter() - _IMPORTED_AT
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _log_listening(url: str, num_models: int, num_processes: int) -> None:
    """Log where the server listens; a warning if its event loop is the slower one."""
    loop_name = _loop_name()
    level = logging.INFO if loop_name == "uvloop" else logging.WARNING
    said = "listening on url=%s models=%d api_processes=%d seconds=%.2f event_loop=%s"
    logger.log(level, said, url, num_models, num_processes, _process_age(), loop_name)


def _loop_name() -> str:
    """Return the name of the running event loop, with a hint if it is the slower one."""
    is_fast = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return "uvloop" if is_fast else "asyncio (uvloop is not installed: each request takes longer)"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the fastest installed event loop; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:  # it has no build for every platform
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

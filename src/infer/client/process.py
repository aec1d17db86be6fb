"""The engine as a process of its own: `python -m infer.client.process`, started by `supervisor.py`.

HTTP, JSON and detokenizing must not share an interpreter with the loop that feeds the device, so the
scheduler and the model live here and speak through one unix socket (see messages.py).

    start    import PyTorch; take one line of JSON on standard input (`Launch`) meanwhile, load the model,
             compile and capture all that steps can need, send `Ready`
    turn     take every command that is there; make one step, send a `StepReport`; one embedding, another
    idle     sleep in the socket until a command comes: no timer, no polling, no CPU
    end      `Stop`, or standard input closes because the server is gone

The server holds the other end of standard input open for as long as it lives. Ctrl-C and SIGTERM are
its business alone: a signal sent to the whole group must not end the engine before requests have drained.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from infer.client.messages import (
    Abort,
    Add,
    Answer,
    Command,
    Embed,
    Launch,
    Ready,
    ResetPrefixCache,
    StepReport,
    Stop,
    Unsubscribe,
    Withdraw,
    decode_command,
    encode,
    refuse_command,
    to_failure,
)
from infer.client.subscribers import Subscribers
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.engine.gc_freeze import freeze
from infer.errors import InferError
from infer.loader.find.source import resolve_model
from infer.log import setup_logging
from infer.scheduling.request import StepOutput

logger = logging.getLogger(__name__)

STDIN = 0
LINGER_MS = 2000  # for the last message to reach the server
EXIT_FAILED = 1
EXIT_ORPHANED = 3


class EngineServer:
    """The loop around an engine that serves one socket."""

    def __init__(self, engine: Engine, link: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._subscribers: Subscribers[int, int] = Subscribers(engine)
        self._link = link
        self._num_commands = 0
        self._made: list[tuple[int, StepOutput]] = []
        self._answers: list[Answer] = []

    def run(self) -> None:
        """Serve until told to stop."""
        while True:
            for frame in self._receive():
                self._num_commands += 1
                try:
                    command = decode_command(frame)
                except (InferError, msgspec.DecodeError) as error:  # one mistake must not stop every request
                    logger.warning("command refused reason=%r", str(error))
                    answer = refuse_command(frame, error)
                    self._answers += [] if answer is None else [answer]
                    continue
                if isinstance(command, Stop):
                    return
                self._carry_out(command)
            self._work()

    def _work(self) -> None:
        """Run one step and report it, then make one embedding: tokens do not wait for an embedding."""
        if self._engine.has_work:
            self._made += self._subscribers.step()
        self._report()
        embedded = self._subscribers.embed_next()
        if embedded is not None:
            ticket, result = embedded
            if isinstance(result, Exception):
                self._answer_error(ticket, result)
            else:
                self._answers.append(Answer(ticket, result, None))
            self._report()

    def _receive(self) -> list[bytes]:
        """Return every command that has arrived; an idle engine waits for one."""
        frames: list[bytes] = []
        if not self._subscribers.has_work:
            frames.append(self._link.recv())
        while True:
            try:
                frames.append(self._link.recv(zmq.NOBLOCK))
            except zmq.Again:
                return frames

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Add):
            refused = self._subscribers.add(command.request, command.ticket)
            if refused is not None:
                self._answer_error(command.ticket, refused)
        elif isinstance(command, Unsubscribe):
            self._subscribers.unsubscribe(command.request_id, command.ticket)
        elif isinstance(command, Abort):
            self._made += self._subscribers.abort(command.request_id, command.index)
        elif isinstance(command, Embed):
            refused = self._subscribers.embed(
                command.ticket, command.prompt, command.pooling, command.request_id
            )
            if refused is not None:
                self._answer_error(command.ticket, refused)
        elif isinstance(command, Withdraw):
            self._subscribers.withdraw(command.ticket)
        elif isinstance(command, ResetPrefixCache):
            try:
                self._answers.append(Answer(command.ticket, self._engine.reset_prefix_cache(), None))
            except Exception as error:  # it belongs to this call alone
                logger.exception("prefix cache not reset")
                self._answer_error(command.ticket, error)

    def _answer_error(self, ticket: int, error: Exception) -> None:
        self._answers.append(Answer(ticket, None, to_failure(error)))

    def _report(self) -> None:
        report = StepReport(
            num_commands=self._num_commands,
            stats=self._subscribers.stats(),
            tickets=[ticket for ticket, _ in self._made],
            outputs=[output for _, output in self._made],
            answers=self._answers,
        )
        self._made, self._answers = [], []
        self._link.send(encode(report))


def load_engine(config: EngineConfig) -> Engine:
    """Find the model, load it and build its engine, without a tokenizer: text stays with the server."""
    from infer.client.load import load_weights  # here: a test's engine has no model, and needs no torch
    from infer.engine.build import build_engine
    from infer.loader.load import read_headers

    source = resolve_model(config.load.model, revision=config.load.revision, show_progress=False)
    return build_engine(config, load_weights(config, read_headers(source)))


def main(make_engine: Callable[[EngineConfig], Engine] = load_engine) -> int:
    """Run the engine process from its first line of input to its end; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    launch = msgspec.json.decode(_read_line(), type=Launch)
    threading.Thread(target=_exit_with_the_server, args=(launch,), name="infer-lifeline", daemon=True).start()
    setup_logging(launch.log_level)
    with zmq.Context() as context, context.socket(zmq.PAIR) as link:
        link.set_hwm(0)  # what is on its way is bounded by max_tokens of the requests being served
        link.linger = LINGER_MS
        link.connect(launch.endpoint)
        try:
            engine = make_engine(EngineConfig.from_knobs(**launch.knobs))
            while engine.prepare():
                pass
            freeze()  # the model and its parts live as long as the process
            link.send(encode(Ready(engine.stats(), engine.family, engine.context_len, engine.model_len)))
            EngineServer(engine, link).run()
        except BaseException as error:
            if not isinstance(error, InferError):
                logger.exception("engine process died")
            link.send(encode(to_failure(error)))
            return EXIT_FAILED
    return 0


def _read_line() -> bytes:
    """The first line of standard input, unbuffered: a daemon thread reads on from there."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(STDIN, 1)
        if not piece:
            os._exit(EXIT_ORPHANED)
        line += piece
    return bytes(line)


def _exit_with_the_server(launch: Launch) -> None:
    """Wait for the end of standard input, which comes however the server ends; clean up in its place."""
    while os.read(STDIN, 4096):
        pass
    socket = Path(launch.endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):  # the server may have had the time to do it
        socket.unlink()
        socket.parent.rmdir()
    os._exit(EXIT_ORPHANED)


def import_engine() -> None:
    """Import what `load_engine` will need, and waits for: the server is not yet ready to give orders."""
    from infer.client import load  # noqa: F401
    from infer.engine import build  # noqa: F401


if __name__ == "__main__":
    threading.Thread(target=import_engine, name="infer-import", daemon=True).start()
    sys.exit(main())

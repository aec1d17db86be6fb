"""The messages between an API process of a server and an engine in its own process, as msgpack.

    server                                         engine
    Add, Unsubscribe, Abort                    ──►
    ResetPrefixCache, Explain, SetAdapter      ──►
    Watch                                      ──►
                                               ◄── LiveReport
    Ping                                       ──►
                                               ◄── StepReport  one per step, for all requests of this server
                                                               process; the others get the counts now and then
                               (once, at first) ◄── Ready  or  Failure
    Stop                                       ──►

Every call of the client has a *ticket*, a number it never uses twice; answers and outputs carry it back.
A turn of the engine's loop takes all commands that are there, makes at most one step and sends a
`StepReport`: the outputs of all requests, the answers to calls, and the engine's own counts.

Nothing is pickled: both ends know the types below, and bytes that do not fit a type are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from infer import errors
from infer.engine.live import LiveSnapshot
from infer.engine.stats import EngineStats
from infer.engine.stories import EngineStory
from infer.errors import EngineError, InferError, RequestError
from infer.scheduling.request import Request, StepOutput

# -- from the server ------------------------------------------------------------------------------


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The number of this engine among the engines of one model; `placement.py` finds its place."""

    number: int = 0
    count: int = 1
    shares_device: bool = False  # whether there may be fewer GPUs than replicas


ALONE = Replica()


class RecordOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The record that an engine process writes of its run."""

    path: str
    has_text: bool
    max_bytes: int  # limit of the file and of the one set aside


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine process: the first line of its standard input, as JSON."""

    endpoints: list[str]  # the unix sockets to connect to, one for each API process
    knobs: dict[str, Any]  # knobs of the EngineConfig
    log_level: str
    spawned_at: float = 0.0  # perf_counter seconds, a clock that processes share; 0: not told
    replica: Replica = ALONE
    num_stories: int = 0  # requests that have ended and can still be explained; 0: none can be
    record: RecordOrders | None = None  # None: nothing is written down


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rank's process: the first line of its standard input, as JSON."""

    knobs: dict[str, Any]
    rank: int
    size: int
    memory: int  # file descriptor of the shared memory
    report: int  # file descriptor of the pipe
    num_threads: int
    log_level: str


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The news of a node: a rank has done a part of its start, or the group has ended."""

    rank: int = 0
    reason: str | None = None  # why the group has ended
    failure: Failure | None = None  # the error of a rank that failed to start


class NodeLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a node other than the first that a program starts: the first line of its input."""

    knobs: dict[str, Any]
    log_level: str
    token: str  # the secret of the nodes


DONE = b"done"  # line that the process of a rank reports after each part of its start


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Serve this request; outputs come with the ticket."""

    ticket: int
    request: Request


class Unsubscribe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request whose outputs are no longer read."""

    ticket: int
    request_id: str


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a request, or one sequence of it; its reader gets the last outputs."""

    request_id: str
    index: int | None


class Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A command that is answered under its ticket, with what it asks for or with the error that it met."""

    ticket: int


class ResetPrefixCache(Call, frozen=True):
    """Forget all cached prefixes; answer with the number of blocks."""


class Explain(Call, frozen=True):
    """Answer with the story of a request, or with None."""

    request_id: str


class SetAdapter(Call, frozen=True):
    """Load the LoRA adapter in a directory under a name, or unload it; the answer says that it is done."""

    name: str
    path: str | None  # None: unload it
    replaces: bool = False  # another one may have the name


class Watch(Call, frozen=True):
    """Send a `LiveReport`, and write steps down for the next one."""


class Sleep(Call, frozen=True):
    """Let go of the engine; answer with the bytes of its weights, which stay in host memory if they fit."""

    max_bytes: int


class Wake(Call, frozen=True):
    """Build the engine again; the answer says that it is there."""


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Report that the loop is alive: sent to an engine that has had nothing to report for a while."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the process."""


CallCommand: TypeAlias = ResetPrefixCache | Explain | SetAdapter | Watch | Sleep | Wake
Command: TypeAlias = Add | Unsubscribe | Abort | CallCommand | Ping | Stop

# -- from the engine ------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An exception as data; as a message of its own, the reason why the engine ended or never started."""

    kind: str  # the name of a class in errors.py
    message: str
    param: str | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded and requests are welcome; holds the facts that the text side needs."""

    stats: EngineStats
    family: str = ""  # family of the model's network, by which a chat template is chosen
    context_len: int = 0  # tokens of the longest sequence served
    model_len: int = 0  # tokens of the model's own context
    phases: dict[str, float] = {}  # seconds of each phase of the start, in order
    max_queue: int | None = None  # sequences that may wait while others run; None: no limit


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, or the error of a request that was not accepted."""

    ticket: int
    result: int | None
    failure: Failure | None
    story: EngineStory | None = None


class StepReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The outputs, answers and counts of one turn of the engine's loop."""

    num_commands: int  # commands taken since the start: the server knows which of its commands have arrived
    stats: EngineStats
    tickets: list[int]  # tickets of the requests that the outputs belong to, one each
    outputs: list[StepOutput]
    answers: list[Answer] = []
    prefixes: dict[int, bool] = {}  # prefixes that came (true) or went, by hash, if it has replicas


class LiveReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a `Watch`."""

    ticket: int
    snapshot: LiveSnapshot


Message: TypeAlias = Ready | StepReport | LiveReport | Failure

_encoder = msgspec.msgpack.Encoder()
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode  # what the server sent
decode_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode  # what the engine sent


def encode(message: Command | Message) -> bytes:
    """The message as bytes; a request that no wire format could hold is the client's mistake."""
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:  # 2^64, half a surrogate pair, an object
        raise RequestError(
            "a request must hold plain numbers of at most 64 bits and text that is valid unicode"
        ) from error


def refuse_command(data: bytes, error: InferError | msgspec.DecodeError) -> Answer | None:
    """The answer to a command that could not be decoded; None if the command gets no answer."""
    raw = msgspec.msgpack.decode(data)
    if raw[0] != Add.__name__:
        return None
    if isinstance(error, msgspec.DecodeError):
        error = RequestError(f"the request has a field of the wrong type: {error}")
    return Answer(raw[1], None, to_failure(error))


# -- exceptions -----------------------------------------------------------------------------------

_KINDS: dict[str, type[InferError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, InferError)
}


def to_failure(error: BaseException) -> Failure:
    """An exception as data. One that is not ours is a bug: its text may name files, so only its type goes."""
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS:
            return Failure(
                kind.__name__, str(error), error.param if isinstance(error, RequestError) else None
            )
    return Failure(EngineError.__name__, f"{type(error).__name__} in the engine")


def to_error(failure: Failure) -> InferError:
    """The exception again, of the class it had."""
    kind = _KINDS.get(failure.kind, EngineError)
    error = kind.__new__(kind)  # past __init__: some build their message from parts that did not travel
    error.args = (failure.message,)
    if isinstance(error, RequestError):
        error.param = failure.param
    return error

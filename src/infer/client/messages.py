"""The messages between an API process of a server and an engine in its own process, as msgpack.

    server                                         engine
    Add, Unsubscribe, Abort                    ──►
    ResetPrefixCache, Explain, SetAdapter      ──►
    Watch                                      ──►
                                               ◄── LiveReport
    Ping                                       ──►
                                               ◄── StepReport  one per step, for all requests of this server
                                                               process; the others get counters, less often
                                  (once, first) ◄── Ready  or  Failure
    Stop                                       ──►

Every call of the client has a *ticket*, a number it never reuses; answers and outputs carry it back.
An iteration of the engine's loop handles all pending commands, runs at most one step and sends a
`StepReport`: the outputs of all requests, the answers to calls, and the engine's counters.

Nothing is pickled: both ends know the types below, and bytes that match no type are an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from infer import errors
from infer.config.settings import EngineConfig
from infer.engine.live import LiveSnapshot
from infer.engine.stats import EngineStats
from infer.engine.stories import EngineStory
from infer.errors import EngineError, InferError, RequestError
from infer.scheduling.request import Request, StepOutput

# -- from the server ------------------------------------------------------------------------------


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The number of this engine among the engines of one model; `placement.py` picks its device."""

    number: int = 0
    count: int = 1
    shares_device: bool = False  # True: there may be fewer GPUs than replicas


ALONE = Replica()


class RecordOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the record that an engine process writes of its run."""

    path: str
    has_text: bool
    max_bytes: int  # limit for the file and its predecessor each


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an engine process: the first line of its standard input, as JSON."""

    endpoints: list[str]  # the unix sockets to connect to, one for each API process
    config: EngineConfig
    log_level: str
    spawned_at: float = 0.0  # perf_counter seconds, a clock that processes share; 0: unknown
    replica: Replica = ALONE
    num_stories: int = 0  # finished requests that can still be explained
    record: RecordOrders | None = None  # None: no record


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rank's process: the first line of its standard input, as JSON."""

    config: EngineConfig
    rank: int
    memory: int  # file descriptor of the shared memory
    report: int  # file descriptor of the pipe
    num_threads: int
    log_level: str


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report from a node: a rank has finished a part of its startup, or the group has ended."""

    rank: int = 0
    reason: str | None = None  # why the group has ended
    failure: Failure | None = None  # the error of a rank that failed to start


class NodeLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a node after the first, if a program starts it: the first line of its input."""

    config: EngineConfig
    log_level: str
    token: str  # the secret of the nodes


TOKEN = "INFER_RANK_TOKEN"  # environment variable with the secret of the nodes
DONE = b"done"  # line that a rank's process reports after each part of its startup


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Serve this request; its outputs carry the ticket."""

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
    """A command whose answer carries its ticket and either a result or an error."""

    ticket: int


class ResetPrefixCache(Call, frozen=True):
    """Forget all cached prefixes; answer with the number of blocks."""


class Explain(Call, frozen=True):
    """Answer with the story of a request, or with None."""

    request_id: str


class SetAdapter(Call, frozen=True):
    """Load a LoRA adapter from a directory under a name, or unload it; answered when done."""

    name: str
    path: str | None  # None: unload it
    replaces: bool = False  # another adapter may have the name


class Watch(Call, frozen=True):
    """Send a `LiveReport`, and record steps for the next one."""


class Sleep(Call, frozen=True):
    """Free the engine; answer with the bytes of its weights, which move to host memory if they fit."""

    max_bytes: int


class Wake(Call, frozen=True):
    """Rebuild the engine; answer with the bytes of pinned memory that it keeps for its next sleep."""


class DropPinned(Call, frozen=True):
    """Free the pinned memory that an engine kept when it woke."""


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Make an engine that has been silent for a while report, to show that its loop is alive."""


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the process."""


CallCommand: TypeAlias = ResetPrefixCache | Explain | SetAdapter | Watch | Sleep | Wake | DropPinned
Command: TypeAlias = Add | Unsubscribe | Abort | CallCommand | Ping | Stop

# -- from the engine ------------------------------------------------------------------------------


class Failure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An exception as data; as a message by itself, the reason the engine ended or failed to start."""

    kind: str  # the name of a class in errors.py
    message: str
    param: str | None = None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded and requests are accepted; has the model's facts that the server needs."""

    stats: EngineStats
    family: str = ""  # family of the model's network, by which a chat template is chosen
    context_len: int = 0  # tokens of the longest sequence that is served
    model_len: int = 0  # context length of the model itself
    phases: dict[str, float] = {}  # seconds of each phase of startup, in order
    max_queue: int | None = None  # most sequences that may wait; None: no limit


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, or the error of a request that was not accepted."""

    ticket: int
    result: int | None
    failure: Failure | None
    story: EngineStory | None = None


class StepReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The outputs, answers and counters of one iteration of the engine's loop."""

    num_commands: int  # commands received since the start, so the server knows which have arrived
    stats: EngineStats
    tickets: list[int]  # the ticket of each output's request
    outputs: list[StepOutput]
    answers: list[Answer] = []
    prefixes: dict[int, bool] = {}  # prefixes added (true) or evicted, by hash, if it has replicas


class LiveReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a `Watch`."""

    ticket: int
    snapshot: LiveSnapshot


Message: TypeAlias = Ready | StepReport | LiveReport | Failure

_encoder = msgspec.msgpack.Encoder()
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode  # server to engine
decode_message: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode  # engine to server


def encode(message: Command | Message) -> bytes:
    """Encode a message; a request that no wire format can represent is the client's error."""
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:  # 2^64, a lone surrogate, an object
        raise RequestError(
            "a request may contain only plain numbers of at most 64 bits and valid Unicode text"
        ) from error


def refuse_command(data: bytes, error: InferError | msgspec.DecodeError) -> Answer | None:
    """Return the answer to a command that could not be decoded; None if it gets no answer."""
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
    """Convert an exception to data; for a bug only its type, because its text may name files."""
    for kind in type(error).__mro__:
        if kind.__name__ in _KINDS:
            return Failure(
                kind.__name__, str(error), error.param if isinstance(error, RequestError) else None
            )
    return Failure(EngineError.__name__, f"{type(error).__name__} in the engine")


def to_error(failure: Failure) -> InferError:
    """Convert data back to an exception of its original class."""
    kind = _KINDS.get(failure.kind, EngineError)
    error = kind.__new__(kind)  # skip __init__: some build their message from fields that were not sent
    error.args = (failure.message,)
    if isinstance(error, RequestError):
        error.param = failure.param
    return error

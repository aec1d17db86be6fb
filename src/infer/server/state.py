"""The server's state: the models it serves, and the record of the current HTTP request.

A *served model* is a prompt encoder (tokenizer, chat template) and one or more engines. A route looks up a
model by the name in the body, turns the body into requests with its encoder, and sends each request to the
engine that the router picks.

A *request record* is created for every HTTP request and found through a context variable. The client sees its
id (`x-request-id`), and every log line about the request has it. The engine's log lines have it, too, because
the engine's request ids begin with it.

    x-request-id: req-7f      ──►   req-7f/cmpl-03ab-0,  req-7f/cmpl-03ab-1      one per prompt of the body

An *alias* is a name for a model, or for several by weight (fleet/shares.py). All requests of one *asker* get
the same model. The asker is the user that the body names, else the API key; without either, every request is
its own asker.

A request *holds* its models from the parsing of its body to the last byte of its response, and a model is
removed only when no request holds it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Literal, NamedTuple

from infer.client.client import EngineClient
from infer.config.server import ModelShares, ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import RequestTimeout, UnknownModel, closest
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request
from infer.server.explain.served import ServedRequest, ServedRequests
from infer.server.fleet.router import Router
from infer.server.fleet.shares import by_weight, choose_model
from infer.server.processes.board import Board
from infer.server.processes.messages import ModelUse
from infer.server.response_store import RemoteStore, ResponseStore

UNLOAD_POLL_S = 0.02
Api = Literal["openai", "anthropic", "ollama"]
RAW_SEND = "infer.send"  # key of a scope: the connection's own `send`, for streams


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model under the name clients use, with the engines that run it."""

    name: str
    encoder: PromptEncoder
    clients: list[EngineClient]
    created: int  # seconds since 1970, for /v1/models
    router: Router = field(default_factory=Router)
    num_held: int = 0  # open HTTP requests that use it
    engines: Sequence[int] = ()  # numbers of its engines in all API processes
    used_at: float = field(default_factory=monotonic)  # when a request last acquired or released it
    keep_s: float | None = None  # idle seconds until it is unloaded, if a client set them
    kept_at: float = 0.0  # when the client set it, in monotonic seconds
    config: EngineConfig = field(default_factory=EngineConfig)  # config of its engines
    planned_bytes: int = 0  # memory of its engines, if it is limited (loaded_memory)
    host_bytes: int = 0  # host memory of its weights while it sleeps, or kept for the next time

    @property
    def use(self) -> ModelUse:
        """Return the use of the model in this process."""
        return ModelUse(self.num_held, self.used_at, self.keep_s, self.kept_at)

    @property
    def is_up(self) -> bool:
        """True if an engine can serve requests now."""
        return any(client.failure is None for client in self.clients)

    def pick(self, request: Request) -> EngineClient:
        """Return the engine for this request."""
        return self.router.pick(request, self.clients)

    def why_cut_off(self, timeout_s: float) -> str:
        """Return the error message for requests that still hold the model after `timeout_s` seconds."""
        time = f"{timeout_s:g} s (drain_timeout) that it had left"
        return f"model {self.name!r} was unloaded, and this request did not end in the {time}; name another"

    async def wait_unheld(self, timeout_s: float) -> None:
        """Wait until no HTTP request holds the model, or until `timeout_s` seconds have passed."""
        give_up_at = monotonic() + timeout_s
        while self.num_held and monotonic() < give_up_at:
            await asyncio.sleep(UNLOAD_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """An error for a client; `ApiError` (protocol/errors.py) formats it as JSON."""

    status: int
    message: str
    param: str | None = None  # name of the field to blame
    code: str | None = None  # OpenAI's error code, if it has one; None: the status


class Span(NamedTuple):
    """A stage of a request in a trace."""

    name: str
    start: float  # perf_counter seconds
    end: float
    facts: dict[str, str | int]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The facts about one HTTP request while it is served, without prompts, outputs or keys."""

    request_id: str
    arrived_at: float  # perf_counter seconds
    path: str = ""  # path of the route
    api: Api = "openai"  # API of its path, which decides the format of errors
    is_lenient: bool = False  # ignore unknown fields of the body that resemble no known one
    tenant: str = ""  # hash of the API key, if each key has its own cache (auth.py)
    asker: str = ""  # requests of one asker get the same model of an alias
    user_field: str = ""  # field of the body that names the asker
    has_chosen: bool = False  # the asker has decided which model is used
    owner: str | None = ""  # hash of the API key, if any; None: the operator, who may see all
    unknown: dict[str, None] = field(default_factory=dict)  # unknown fields, in order
    status: int = 0  # 0: no response has started
    models: list[ServedModel] = field(default_factory=list)  # held until the end; the last one serves it
    load_s: float = 0.0  # seconds that it waited for a model to be loaded
    adapter: str = ""  # name of the requested LoRA adapter
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    is_complete: bool = False  # the whole response was passed to the connection
    is_gone: bool = False  # the client left before that
    error: RequestFailure | None = None  # error sent instead of a response or in a stream
    marks: list[tuple[str, float]] | None = None  # ends of stages, if they are recorded
    is_traced: bool = False  # True: the response has them as a header
    stories: ServedRequests | None = None  # store for its story, if it reaches an engine
    story: ServedRequest | None = None  # its story
    spans: list[Span] | None = None  # stages of its prompts, if it is traced (tracing.py)

    @property
    def model_name(self) -> str | None:
        """The name of the adapter or model that serves it; None if no model was requested."""
        return self.adapter or self.models[-1].name if self.models else None

    def note_user(self, body: Any) -> None:
        """Make the user that a body names the asker, instead of the API key."""
        if not isinstance(body, dict):
            return
        metadata = body.get("metadata")
        inner = metadata.get("user_id") if isinstance(metadata, dict) else None
        users = {"user": body.get("user"), "safety_identifier": body.get("safety_identifier")}
        for name, user in (users | {"metadata": inner}).items():
            if isinstance(user, str) and user:
                self.asker, self.user_field = f"user {user}", name
                return

    def mark(self, stage: str, at: float | None = None) -> None:
        """Record the end of a stage, now or at a `perf_counter` time, if stages are recorded."""
        if self.marks is not None:
            self.marks.append((stage, perf_counter() if at is None else at))

    @property
    def timing(self) -> str:
        """The duration of each stage so far, as the value of a `server-timing` header.

        If a body has several prompts, a stage ends when the last of them leaves it.
        """
        ends: dict[str, float] = {}
        for stage, at in self.marks or ():
            ends[stage] = max(at, ends.get(stage, at))
        before, parts = self.arrived_at, []
        for stage, at in ends.items():
            parts.append(f"{stage};dur={1000 * (at - before):.3f}")
            before = at
        return ", ".join(parts)


_RECORD: ContextVar[RequestRecord | None] = ContextVar("infer_request_record", default=None)


@contextmanager
def recording(record: RequestRecord) -> Iterator[None]:
    """Make `record` the current record; on exit, release the models that its request holds."""
    token = _RECORD.set(record)
    try:
        yield
    finally:
        _RECORD.reset(token)
        for model in record.models:
            model.num_held -= 1
            model.used_at = monotonic()


def current_record() -> RequestRecord | None:
    """Return the record of the current HTTP request; None outside of a request."""
    return _RECORD.get()


def mark(stage: str) -> None:
    """Record the end of a stage of the current HTTP request, if stages are recorded."""
    if (record := _RECORD.get()) is not None:
        record.mark(stage)


def current_id() -> str:
    """Return the id of the current HTTP request, for a log line."""
    record = _RECORD.get()
    return record.request_id if record is not None else "unknown"


def engine_id(own_id: str) -> str:
    """Return an id for the engine that begins with the id that the client sees."""
    record = _RECORD.get()
    return own_id if record is None else f"{record.request_id}/{own_id}"


STAGES = ("loaded", "asleep", "unloaded")  # stages of a model that is known here


def salt_of(given: str | None) -> str:
    """Return the cache salt of the current HTTP request: the API key's, if any, then the client's own.

    A client's salt cannot equal another tenant's, because each begins with a hash of the same length.
    """
    record = _RECORD.get()
    return (record.tenant if record is not None else "") + (given or "")


@dataclass(slots=True, eq=False)
class ServerState:
    """Everything that routes share, found at `app.state.server`."""

    config: ServerConfig
    models: dict[str, ServedModel] = field(default_factory=dict)
    aliases: dict[str, ModelShares] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)  # model of each LoRA adapter, by adapter name
    default_model: str | None = None
    loadable: Sequence[str] = ()  # names of models that are loaded on demand
    asleep: dict[str, ServedModel] = field(default_factory=dict)  # unloaded, but weights are in host memory
    demand: Callable[[str], Awaitable[object]] | None = None  # loads one of them, and waits for it
    board: Board = field(default_factory=Board)  # flags and counts of all API processes
    is_cut_off: bool = False  # set by a second signal: open requests end with an error
    responses: ResponseStore | RemoteStore = field(init=False)
    stories: ServedRequests = field(init=False)  # requests of this process

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.config.response_store)
        self.stories = ServedRequests(self.config.explain_requests)

    @property
    def names(self) -> list[str]:
        """The names of all models, loaded or not, without aliases."""
        return list(dict.fromkeys((*self.loadable, *self.models)))

    def stage_of(self, name: str) -> str:
        """Return one of STAGES; an asleep model has its weights in host memory."""
        meant = self._weights(name).keys()
        return (
            "loaded" if meant & self.models.keys() else "asleep" if meant & self.asleep.keys() else "unloaded"
        )

    @property
    def all_names(self) -> list[str]:
        """The names of all models, then aliases and adapters, which refer to a model."""
        return [*self.names, *self.aliases, *self.adapters]

    def adapter_of(self, name: str | None) -> str:
        """Return the LoRA adapter of a name; "": none."""
        return name if name is not None and name in self.adapters else ""

    def _weights(self, name: str) -> ModelShares:
        """Return the models that a name refers to, with their weights."""
        return self.aliases.get(name) or {self.adapters.get(name, name): 1.0}

    def models_of(self, name: str) -> list[ServedModel]:
        """Return the loaded models that a name refers to, largest weights first."""
        names = by_weight(self._weights(name))
        if not any(each in self.models or each in self.loadable for each in names):
            raise self._unknown(name)
        return [self.models[each] for each in names if each in self.models]

    async def use_model(self, name: str | None) -> ServedModel:
        """Return the model of a name as `get_model` does, after loading it if it is loaded on demand."""
        wanted = name if name is not None else self.default_model
        if wanted is None or self.demand is None:
            return self.get_model(name)
        limit_s = self.config.request_timeout or None
        try:
            async with asyncio.timeout(limit_s):
                while (chosen := self._choose(wanted)) in self.loadable and self._find(chosen) is None:
                    asked_at = perf_counter()
                    await self.demand(chosen)
                    if (record := _RECORD.get()) is not None:
                        record.mark("load")
                        record.load_s += perf_counter() - asked_at
        except TimeoutError:
            raise RequestTimeout(
                f"model {wanted!r} was not loaded after {limit_s:g} s; try again later"
            ) from None
        return self.get_model(name)

    def get_model(self, name: str | None) -> ServedModel:
        """Return the model of a name, or the default model, and let the current request hold it."""
        found = self.look_at(name)
        if found is None:
            raise self._unknown(name)
        if (record := _RECORD.get()) is not None:
            record.models.append(found)
            record.adapter = self.adapter_of(name)
            found.num_held += 1
        found.used_at = monotonic()
        return found

    def look_at(self, name: str | None) -> ServedModel | None:
        """Return the model of a name without loading or holding it; None: it is not loaded."""
        wanted = name if name is not None else self.default_model
        chosen = self._choose(wanted) if wanted is not None else ""
        found = self._find(chosen)
        if found is None and chosen not in self.loadable:
            raise self._unknown(name)
        return found

    def _find(self, name: str) -> ServedModel | None:
        """Return the model of a name: one that the request holds, even if unloaded, else the loaded one."""
        record = _RECORD.get()
        held = record.models if record is not None else ()
        return next((model for model in held if model.name == name), self.models.get(name))

    def _choose(self, name: str) -> str:
        """Return the name of the model that an alias means for the current request; skip any that is down.

        An on-demand model that is not loaded may be chosen; a model that the request holds is chosen again.
        """
        weights = self._weights(name)
        if len(weights) == 1:
            return next(iter(weights))
        record = _RECORD.get()
        for held in record.models if record is not None else ():
            if held.name in weights:
                return held.name
        known = self.names
        served = {each: weight for each, weight in weights.items() if each in known}
        up = {
            each: weight
            for each, weight in served.items()
            if each not in self.models or self.models[each].is_up
        }
        asker = secrets.token_hex(8)
        if record is not None:
            asker = f"key {record.owner}" if record.owner else asker
            asker = record.asker = record.asker or asker  # kept: every look at this body finds the same model
            record.has_chosen = True
        return choose_model(up or served or weights, name, asker)

    def _unknown(self, name: str | None) -> UnknownModel:
        known = self.all_names
        if not known:
            return UnknownModel("no model is served at the moment; try again later", param="model")
        hint = closest(name or "", known, listed="served")
        return UnknownModel(f"model {name!r} is not served here{hint}", param="model")

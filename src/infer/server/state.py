"""What every route needs: the models that are served, and the limits they are served under.

A *served model* is a text side (tokenizer, template) and one or more engines behind it. Routes ask for
a model by the name a client used, turn the body into requests with its text side, and send each request
to the engine the router picks.

Whoever asked for a model *holds* it until the end of the HTTP request, from the first look at the body to
the last byte of the answer: a model is taken away only when nobody holds it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from infer.client.client import EngineClient
from infer.config.settings import ServerConfig
from infer.errors import UnknownModel, closest
from infer.frontend.prompts import PromptEncoder
from infer.scheduling.request import Request
from infer.server.fleet.router import Router
from infer.server.middleware.request_record import current_record


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model under the name clients use, with the engines that run it."""

    name: str
    encoder: PromptEncoder
    clients: list[EngineClient]
    created: int  # seconds since 1970, for /v1/models
    router: Router = field(default_factory=Router)
    max_queue: int | None = None  # sequences that may wait for each engine
    num_held: int = 0  # HTTP requests that asked for it and have not ended

    def pick(self, request: Request) -> EngineClient:
        """The engine for this request."""
        return self.router.pick(request, self.clients)


_HELD: ContextVar[list[ServedModel] | None] = ContextVar("infer_held_models", default=None)


@contextmanager
def holding_models() -> Iterator[None]:
    """Around one HTTP request: what `ServerState.get_model` gives out in here is held until the end."""
    held: list[ServedModel] = []
    token = _HELD.set(held)
    try:
        yield
    finally:
        _HELD.reset(token)
        for model in held:
            model.num_held -= 1


@dataclass(slots=True, eq=False)
class ServerState:
    """Everything the routes share; `app.state.server` holds it."""

    config: ServerConfig
    models: dict[str, ServedModel] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    default_model: str | None = None
    is_starting: bool = False  # the first models are being loaded
    is_draining: bool = False  # no new requests
    num_active: int = 0  # requests inside, streams not read to their end included

    def get_model(self, name: str | None) -> ServedModel:
        """The model a client named; without a name, the default one."""
        wanted = name if name is not None else self.default_model
        found = self.models.get(self.aliases.get(wanted, wanted)) if wanted is not None else None
        if found is None:
            known = [*self.models, *self.aliases]
            if not known:
                raise UnknownModel("no model is served at the moment; try again later", param="model")
            hint = closest(name or "", known, listed="served")
            raise UnknownModel(f"model {name!r} is not served here{hint}", param="model")
        if (held := _HELD.get()) is not None:
            held.append(found)
            found.num_held += 1
        if (record := current_record()) is not None:
            record.model = found.name
        return found

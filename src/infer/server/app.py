"""The application: its routes, and the layers around them, from the outside in:

    AccessLog     an id, a log line and counts for every request, also for refused ones
    HostCheck     only if the host asks for it: 403 for pages that pretend to be this machine
    CORS          only if an origin is configured; outside Auth, because a browser first asks without a key
    Auth          closed unless listed open
    BodyLimit     reads bodies, up to a size and for a time
    Gate          503 while starting or draining
    Forward       only in API processes other than 0: questions about the whole server go to process 0
    routes        completions, chat, messages, responses, models, tokens, embeddings, scores; those
                  of Ollama and llama.cpp; health, metrics, explain; admin; the page

All layers are plain ASGI: a streamed chunk passes through function calls, not through queues and tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from infer import __version__
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.errors import ConfigError
from infer.server.fleet.fleet import Fleet
from infer.server.fleet.metered_client import MeteredClient
from infer.server.metrics import ServerMetrics
from infer.server.middleware.access_log import AccessLog
from infer.server.middleware.auth import Auth
from infer.server.middleware.forward import Ask, Forward
from infer.server.middleware.host_check import HostCheck, cors_options
from infer.server.middleware.limits import BodyLimit, Gate
from infer.server.protocol.errors import install_error_handlers
from infer.server.routes import (
    admin,
    chat,
    completions,
    embeddings,
    explain,
    health,
    live,
    llama_cpp,
    messages,
    models,
    ollama,
    pages,
    response_memory,
    responses,
    scoring,
    tokens,
)
from infer.server.state import ServerState
from infer.server.tracing import Tracing

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(config: EngineConfig | None = None, server: ServerConfig | None = None) -> FastAPI:
    """An application that starts its engine in the lifespan of its host and stops it at the end.

    For hosts such as `uvicorn --factory`; `infer serve` does more: it answers while the model loads,
    drains, and guards its connections.
    """
    engine_config, server_config = config or EngineConfig(), server or ServerConfig()
    if (server_config.api_processes or 1) > 1:
        raise ConfigError(
            f"api_processes is {server_config.api_processes}, but this application is one process of its "
            "host; leave it out, or start the server with infer serve"
        )
    state = ServerState(config=server_config)
    fleet = Fleet(state, ServerMetrics(server_config.metrics_prefix))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await fleet.start({server_config.served_model_name or "": engine_config})
            yield
        finally:
            await fleet.close()

    return build_app(state, fleet, lifespan=lifespan)


def build_app(
    state: ServerState,
    fleet: Fleet | None = None,
    *,
    lifespan: Lifespan | None = None,
    check_host: bool = False,
    ask: Ask | None = None,
) -> FastAPI:
    """The application around a state; its engines are started and stopped by the caller.

    `check_host` adds the check of the Host header that a server on loopback needs (host_check.py), and lets
    its clients look at the engines without a key, unless it also answers for other hosts or to pages of other
    origins. In an API process other than 0, `ask` reaches process 0 (forward.py).
    """
    config = state.config
    is_private = check_host and not config.allowed_host and not config.cors_origin
    fleet = fleet or Fleet(state, ServerMetrics(config.metrics_prefix))
    for model in state.models.values():
        model.clients = [
            client if isinstance(client, MeteredClient) else fleet.metrics.add(model.name, client)
            for client in model.clients
        ]
    # The interactive docs of the framework load scripts from elsewhere; --docs serves a page of our own.
    # A slash too many is not redirected: the framework would take the address from the Host header.
    app = FastAPI(
        title="infer",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.server, app.state.fleet, app.state.metrics = state, fleet, fleet.metrics
    app.state.live = live.LiveFeeds()
    parts = (
        completions, chat, messages, responses, response_memory, models, tokens, embeddings, scoring, ollama,
        llama_cpp, health, explain,
    )  # fmt: skip
    routers = [part.router for part in parts]
    if config.admin_key is not None:
        routers += [admin.router, admin.vllm_router]
    if config.admin_key is not None or is_private:
        routers.append(live.router)
    routers.append(pages.make_router() if config.ui else ollama.root)
    if config.docs:
        routers.append(pages.make_docs_router())
    # Not by `include_router`, which would analyse every route anew when the first request comes.
    app.router.routes.extend(route for router in routers for route in router.routes)
    install_error_handlers(app)
    # the last added is the outermost
    if ask is not None:
        app.add_middleware(Forward, ask=ask)
    app.add_middleware(Gate, state=state)
    app.add_middleware(BodyLimit, max_body_size=config.max_body_size)
    app.add_middleware(Auth, config=config, is_private=is_private)
    if config.cors_origin:
        app.add_middleware(CORSMiddleware, **cors_options(config))
    if check_host:
        app.add_middleware(HostCheck, allowed_host=config.allowed_host)
    ignores_unknown = config.unknown_fields == "ignore"
    endpoint = config.otlp_traces_endpoint
    app.add_middleware(
        AccessLog,
        metrics=fleet.metrics,
        is_logged=config.access_log,
        ignores_unknown=ignores_unknown,
        stories=state.stories,
        tracing=None if endpoint is None else Tracing(endpoint),
    )
    return app

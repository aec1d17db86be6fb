"""The application: its routes and the middleware around them, outermost first:

    AccessLog     an id, a log line and counters for every request, even a rejected one
    HostCheck     only if the caller asks for it: 403 for web pages that rebind their name to this machine
    CORS          only if an origin is configured; outside Auth, because a preflight request has no key
    Auth          every path needs a key unless listed as open
    BodyLimit     reads bodies, up to a size and a time limit
    Gate          503 while starting or draining
    Forward       only in API processes other than 0: requests about the whole server go to process 0
    routes        completions, chat, messages, responses, models, tokens, embeddings, scores;
                  Ollama's and llama.cpp's; health, metrics, explain; admin; the web page

All middleware is plain ASGI: a streamed chunk passes through function calls, not through queues and tasks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import APIRouter, FastAPI
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
    ollama_models,
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
    """Return an application that starts its engine at lifespan startup and stops it at shutdown.

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
    """Return the application for a state; the caller starts and stops its engines.

    `check_host` adds the check of the Host header that a server on loopback needs (host_check.py), and lets
    its clients view the live page without a key, unless other hosts or other origins are also allowed. In an
    API process other than 0, `ask` reaches process 0 (forward.py).
    """
    config = state.config
    is_private = check_host and not config.allowed_host and not config.cors_origin
    fleet = fleet or Fleet(state, ServerMetrics(config.metrics_prefix))
    for model in state.models.values():
        model.clients = [
            client if isinstance(client, MeteredClient) else fleet.metrics.add(model.name, client)
            for client in model.clients
        ]
    # FastAPI's interactive docs load scripts from a CDN; --docs serves a page of our own. A path with an
    # extra slash is not redirected: the framework would build the address from the Host header.
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
    # Not `include_router`, which would analyse every route again at the first request.
    routers = _routers(config, is_private=is_private)
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
    app.add_middleware(
        AccessLog,
        metrics=fleet.metrics,
        is_logged=config.access_log,
        ignores_unknown=config.unknown_fields == "ignore",
        stories=state.stories,
        tracing=None if config.otlp_traces_endpoint is None else Tracing(config.otlp_traces_endpoint),
    )
    return app


def _routers(config: ServerConfig, *, is_private: bool) -> list[APIRouter]:
    """Return the routers of a server; if it is private, everyone who reaches it may view the live page."""
    parts = (
        completions, chat, messages, responses, response_memory, models, tokens, embeddings, scoring, ollama,
        ollama_models, llama_cpp, health, explain,
    )  # fmt: skip
    routers = [part.router for part in parts]
    if config.admin_key is not None:
        routers += [admin.router, admin.vllm_router]
    if config.admin_key is not None or is_private:
        routers.append(live.router)
    routers.append(pages.make_router() if config.ui else ollama_models.root)
    if config.docs:
        routers.append(pages.make_docs_router())
    return routers

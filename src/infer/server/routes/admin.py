"""The operator's routes, which need the admin key (auth.py).

POST /admin/models/load      {"name": "b", "model": "path or hub id", "knobs": {...}, "replace": false}
POST /admin/models/unload    {"name": "b"}
POST /admin/models/alias     {"alias": "gpt-4", "name": "b"}
                             {"alias": "chat", "models": {"v1": 90, "v2": 10}}
POST /admin/adapters/load    {"name": "sql", "path": "directory", "model": "b", "replace": false}
POST /admin/adapters/unload  {"name": "sql"}
POST /v1/load_lora_adapter   {"lora_name": "sql", "lora_path": "directory"}    the same in vLLM's API
POST /v1/unload_lora_adapter {"lora_name": "sql"}
POST /admin/reset_prefix_cache   {} or {"model": "b"}
POST /admin/drain            {} rejects new requests, {"drain": false} accepts them again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field

from infer.config.knobs import parse_knob
from infer.config.settings import EngineConfig, knob_table
from infer.errors import CheckpointError, ConfigError, MalformedRequest, RequestError
from infer.server.fleet.fleet import Fleet
from infer.server.protocol.body import Body
from infer.server.protocol.stream import unless_disconnected
from infer.server.routes.json_route import JsonRoute

router = APIRouter(prefix="/admin", tags=["admin"], route_class=JsonRoute)
vllm_router = APIRouter(tags=["admin"], route_class=JsonRoute)


class LoadBody(Body):
    """A model to add or replace; `knobs` are the engine's, by name."""

    name: str = Field(min_length=1, max_length=200)
    model: str = Field(min_length=1, max_length=4096)
    knobs: dict[str, Any] = {}
    replace: bool = False


class UnloadBody(Body):
    """A model to remove."""

    name: str


class AliasBody(Body):
    """An alias of a model, or of several by weight; a name of null removes it."""

    alias: str = Field(min_length=1, max_length=200)
    name: str | None = None
    models: dict[str, float] | None = None


class AdapterBody(Body):
    """A LoRA adapter to load for a model, by default for the default model."""

    name: str = Field(min_length=1, max_length=200)
    path: str = Field(min_length=1, max_length=4096)
    model: str | None = None
    replace: bool = False


class VllmAdapterBody(Body):
    """A LoRA adapter to load for the default model, in vLLM's format."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


class VllmUnloadBody(Body):
    """A LoRA adapter to unload, in vLLM's format."""

    lora_name: str


class ResetBody(Body):
    """The model whose prefix caches are cleared; without one, all models."""

    model: str | None = None


class DrainBody(Body):
    """The choice to reject new requests, or to accept them again."""

    drain: bool = True


def _fleet(http: Request) -> Fleet:
    fleet: Fleet = http.app.state.fleet
    return fleet


@router.post("/models/load")
async def load_model(body: LoadBody, http: Request) -> dict[str, Any]:
    """Load one more model; answers when it is ready. If the client leaves, the load is cancelled."""
    try:
        table = knob_table()
        knobs = {name: parse_knob(table[name], v) if name in table else v for name, v in body.knobs.items()}
        config = EngineConfig.from_knobs(**(knobs | {"model": body.model}))
    except ConfigError as error:
        raise RequestError(str(error), param="knobs") from None
    if named := config.own_code():
        raise RequestError.about(
            "knobs", f"must not name code of your own ({', '.join(named)}): only the start of a server can"
        )
    try:
        model = await unless_disconnected(
            http.receive, _fleet(http).load(body.name, config, replaces=body.replace)
        )
    except (ConfigError, CheckpointError) as error:
        raise RequestError(str(error), param="model") from None
    return {"name": model.name, "num_engines": len(model.clients), "max_model_len": model.encoder.context_len}


@router.post("/models/unload")
async def unload_model(body: UnloadBody, http: Request) -> dict[str, Any]:
    """Unload a model, or cancel its load; answers when its engines have stopped."""
    fleet = _fleet(http)
    ended = {"cut_off_requests": await fleet.unload(body.name)}
    return {"name": body.name, "default_model": fleet.state.default_model} | ended


@router.post("/models/alias")
async def set_alias(body: AliasBody, http: Request) -> dict[str, Any]:
    """Set an alias of a model, or of several models by weight, or remove it."""
    if ("name" in body.model_fields_set) == (body.models is not None):
        raise MalformedRequest(
            "give either name, the model that the alias means (null removes it), or models, their weights",
            param="name",
        )
    if body.models == {}:
        raise RequestError.about("models", "is empty; give a weight for each model, as {'v1': 90, 'v2': 10}")
    if body.models is not None:
        _fleet(http).names.set_alias(body.alias, body.models)
        return {"alias": body.alias, "models": body.models}
    if body.name is None:
        _fleet(http).names.remove_alias(body.alias)
    else:
        _fleet(http).names.set_alias(body.alias, {body.name: 1.0})
    return {"alias": body.alias, "name": body.name}


@router.post("/adapters/load")
async def load_adapter(body: AdapterBody, http: Request) -> dict[str, Any]:
    """Load a LoRA adapter, which requests can then name as their model.

    If the client leaves while the load waits for another one, it is cancelled.
    """
    base = await _load_adapter(http, body.name, body.path, body.model, replaces=body.replace)
    return {"name": body.name, "model": base}


@router.post("/adapters/unload")
async def unload_adapter(body: UnloadBody, http: Request) -> dict[str, Any]:
    """Unload a LoRA adapter; requests that began with it finish."""
    await _fleet(http).adapters.unload(body.name)
    return {"name": body.name}


@vllm_router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(body: VllmAdapterBody, http: Request) -> str:
    """Load a LoRA adapter for the default model."""
    with _in_vllm_words():
        await _load_adapter(http, body.lora_name, body.lora_path, None, replaces=body.load_inplace)
    return f"Success: LoRA adapter '{body.lora_name}' added successfully."


@vllm_router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(body: VllmUnloadBody, http: Request) -> str:
    """Unload a LoRA adapter of the default model."""
    with _in_vllm_words():
        await _fleet(http).adapters.unload(body.lora_name)
    return f"Success: LoRA adapter '{body.lora_name}' removed successfully."


@contextmanager
def _in_vllm_words() -> Iterator[None]:
    """Name vLLM's fields in errors."""
    try:
        yield
    except RequestError as error:
        error.param = {"name": "lora_name", "path": "lora_path"}.get(error.param or "")  # no other is given
        raise


async def _load_adapter(http: Request, name: str, path: str, model: str | None, *, replaces: bool) -> str:
    try:
        loading = _fleet(http).adapters.load(name, path, model, replaces=replaces)
        return await unless_disconnected(http.receive, loading)
    except (ConfigError, CheckpointError) as error:
        raise RequestError(str(error), param="path") from None
    except RequestError as error:
        if error.param == "adapter":  # the engine's field: its model takes none
            error.param = "model"
        raise


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(body: ResetBody, http: Request) -> dict[str, Any]:
    """Forget all cached prefixes."""
    return {"num_blocks": await _fleet(http).reset_prefix_caches(body.model)}


@router.post("/drain")
async def drain(body: DrainBody, http: Request) -> dict[str, Any]:
    """Reject new requests; running ones continue. Poll until `num_active` is 0."""
    board = _fleet(http).state.board
    board.is_draining = body.drain
    return {"is_draining": board.is_draining, "num_active": board.num_active}

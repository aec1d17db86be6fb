"""`GET /v1/models`: the served models, with the fields that clients of vLLM and of Anthropic's API read.

`HEAD` has the same status and headers and no body: enough to check if a model exists.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from infer.errors import UnknownModel
from infer.server.protocol.errors import to_api_error
from infer.server.routes.json_route import json_response, make_router, server_state
from infer.server.state import ServerState

router = make_router()

_NAMED = {"object": "model", "type": "model", "owned_by": "infer", "permission": []}


@router.head("/v1/models", response_model=None, include_in_schema=False)
@router.get("/v1/models", response_model=None)
async def list_models(http: Request) -> Response:
    """List all models, aliases and adapters."""
    state = server_state(http)
    cards = [model_card(state, name) for name in state.all_names]
    return json_response({"object": "list", "data": cards, "has_more": False})


@router.head("/v1/models/{name:path}", response_model=None, include_in_schema=False)
@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(name: str, http: Request) -> Response:
    """Return one model."""
    state = server_state(http)
    try:
        return json_response(model_card(state, name))
    except UnknownModel as error:  # the name is the resource here: 404
        return replace(to_api_error(error), status=404).response()


def model_card(state: ServerState, name: str) -> dict[str, Any]:
    """Return the facts about a model that clients may know, which do not include the path of its files.

    An alias of several models shows the one with the largest weight, and the shortest context of all. Little
    is known about an on-demand model that is not loaded.
    """
    models = state.models_of(name)
    weights = state.aliases.get(name, {})
    shares = {"models": weights} if len(weights) > 1 else {}
    if not models:
        never = {"created": 0, "created_at": datetime.fromtimestamp(0, UTC).isoformat(), "loaded": False}
        never["state"] = state.stage_of(name)
        return {**_NAMED, "id": name, "display_name": name, **never, "max_model_len": None, **shares}
    model = models[0]
    stats = model.clients[0].stats()  # all engines of a model are alike
    return {
        **_NAMED,
        "id": name,
        "display_name": name,
        "created": model.created,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "loaded": True,
        "state": "loaded",
        "root": model.name,
        "parent": None if name == model.name else model.name,
        "revision": model.encoder.revision,
        "max_model_len": min(each.encoder.context_len for each in models),
        "dtype": stats.dtype or None,
        "weights": stats.weights or None,
        "kv_cache_dtype": stats.kv_cache_dtype or None,
        "products": stats.products or None,
        "default_sampling_params": dict(model.encoder.sampling_defaults),
        **shares,
    }

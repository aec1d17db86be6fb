"""Ollama's routes about models, and the names by which all of its routes find them.

    GET  /api/tags, /api/ps    all served names; the loaded models, with the time at which each is unloaded
    POST /api/show             what is known about a model
    GET  /api/version          the version of Ollama that this API follows
    POST /api/pull             success for a served model; nothing is downloaded
    /api/create, copy, ...     rejected: only the operator chooses the models

Ollama's names have a tag, so `my-model` is listed as `my-model:latest` and found by either name. A request
may say how long its model stays loaded (`keep_alive`), which has an effect on on-demand models.
"""

from __future__ import annotations

import hashlib
import math
import re
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from infer import __version__
from infer.errors import RequestError, UnknownModel, closest, show_value
from infer.server.protocol.ollama_to_chat import SAMPLING_NAMES, OllamaBody, OllamaOptions
from infer.server.protocol.schemas import AskingBody, Name
from infer.server.routes.json_route import ignored_headers, json_response, make_router, server_state
from infer.server.state import ServedModel, ServerState

FOLLOWED = "0.12.11"  # version of Ollama's API; VS Code rejects servers below 0.6.4
LATEST = ":latest"
DURATION = re.compile(r"-?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
LONGEST_KEEP_S = 10 * 365 * 86_400.0  # a longer time means forever
NEVER = "9999-12-31T23:59:59Z"  # expiry time of a model that is never unloaded
NDJSON = "application/x-ndjson"


class OllamaNamed(AskingBody):
    """A body about one model, named in the newer field or the older one."""

    ignored = frozenset({"insecure", "options", "password", "system", "template", "username", "verbose"})

    model: Name | None = None
    name: Name | None = None

    @property
    def wanted(self) -> str:
        """The model's name."""
        if (self.model or self.name) is None:
            raise RequestError.about("model", "is missing; give the name of a model")
        return str(self.model or self.name)


class OllamaErrorBody(BaseModel):
    """The body of every error of these routes."""

    error: str


router = make_router(OllamaErrorBody)
root = APIRouter(include_in_schema=False)  # only for servers without the web page, which has this path


@root.head("/")
@root.get("/")
async def probe() -> Response:
    """Answer that the server is running, which Ollama's clients check first."""
    return Response("infer is running", media_type="text/plain")


def tagged(name: str) -> str:
    """Return a name as Ollama lists it, with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def find_name(state: ServerState, name: str) -> str:
    """Return the served name that a client means; either name may lack the tag."""
    known = state.all_names
    for each in (name, name.removesuffix(LATEST), tagged(name)):
        if each in known:
            return each
    hint = closest(name, known, listed="served")
    raise UnknownModel(f'model "{name[:100]}" not found{hint}', param="model")


async def use_model(state: ServerState, name: str, body: OllamaBody) -> ServedModel:
    """Return the model of a served name; an on-demand model stays loaded for the body's `keep_alive`."""
    keep_s = None if body.keep_alive is None else read_keep_alive(body.keep_alive)
    model = await state.use_model(name)
    if keep_s is not None and state.demand is not None:
        model.keep_s, model.kept_at = keep_s, monotonic()
    return model


def read_keep_alive(given: str | float) -> float:
    """Return the seconds that a model stays loaded after its last request.

    A number below 0 means forever, and so does one above ten years.
    """
    if isinstance(given, str) and DURATION.fullmatch(given):
        seconds = sum(float(number) * UNIT_S[unit] for number, unit in DURATION_PART.findall(given))
        seconds = -seconds if given.startswith("-") else seconds
    else:
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
    if math.isnan(seconds):
        raise RequestError.about(
            "keep_alive", f'must be seconds or a duration such as "5m" or "24h", got {show_value(given)}'
        )
    return math.inf if seconds < 0 or seconds > LONGEST_KEEP_S else seconds


def spell_time(at: datetime) -> str:
    """Format a UTC time as Ollama does."""
    return at.isoformat().replace("+00:00", "Z")


def now() -> str:
    """Return the current time."""
    return spell_time(datetime.now(UTC))


def details(state: ServerState, name: str, model: ServedModel | None) -> dict[str, Any]:
    """Return Ollama's details of a model, as far as they are known; `model` is None if it is not loaded."""
    family, form = "", ""
    if model is not None:
        stats, family = model.clients[0].stats(), model.encoder.family
        form = stats.weights or stats.dtype
    return {
        "parent_model": tagged(state.adapters[name]) if name in state.adapters else "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": form,
    }


def listed(state: ServerState, name: str) -> dict[str, Any]:
    """Return a model's entry in a list; its digest, by which clients identify models, hashes its name."""
    model = next(iter(state.models_of(name)), None)
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": made_at(model),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details(state, name, model),
    }


def made_at(model: ServedModel | None) -> str:
    """Return the time at which a model was loaded; 1970 if it is not."""
    return spell_time(datetime.fromtimestamp(0 if model is None else model.created, UTC))


def expires_at(state: ServerState, model: ServedModel) -> str:
    """Return the time at which a model will be unloaded if no request uses it."""
    keep_s = model.keep_s if model.keep_s is not None else state.config.idle_unload or math.inf
    if keep_s > LONGEST_KEEP_S:
        return NEVER
    rest_s = max(model.used_at + keep_s - monotonic(), 0.0)
    return spell_time(datetime.now(UTC) + timedelta(seconds=rest_s))


@router.head("/api/tags", response_model=None, include_in_schema=False)
@router.get("/api/tags", response_model=None)
async def list_tags(http: Request) -> Response:
    """List all models, aliases and adapters."""
    state = server_state(http)
    return json_response({"models": [listed(state, name) for name in state.all_names]})


@router.get("/api/ps", response_model=None)
async def list_running(http: Request) -> Response:
    """List the loaded models."""
    state = server_state(http)
    models = []
    for name, model in state.models.items():
        expires = expires_at(state, model)
        rest = {"expires_at": expires, "size_vram": 0, "context_length": model.encoder.context_len}
        models.append(listed(state, name) | rest)
    return json_response({"models": models})


@router.post("/api/show", response_model=None)
async def show(body: OllamaNamed, http: Request) -> Response:
    """Return the facts that clients may know about a model, above all its context length and capabilities.

    This never loads a model: little more than the name of an unloaded on-demand model is known.
    """
    state = server_state(http)
    name = find_name(state, body.wanted)
    model = state.look_at(name)
    shown: dict[str, Any] = {
        "modelfile": f"FROM {tagged(name)}",
        "parameters": "",
        "template": "",
        "modified_at": made_at(model),
        "details": details(state, name, model),
        "model_info": {"general.basename": name if model is None else model.name},
        "capabilities": ["completion"],
    }
    if model is not None:
        encoder = model.encoder
        parameters = [
            f"{option:<30} {value}"
            for option in OllamaOptions.model_fields
            if (value := encoder.sampling_defaults.get(SAMPLING_NAMES.get(option, option))) is not None
        ]
        shown |= {"parameters": "\n".join(parameters), "template": encoder.chat_template or ""}
        shown["model_info"]["general.architecture"] = encoder.family
        shown["model_info"][f"{encoder.family}.context_length"] = encoder.context_len
        abilities = {"tools": encoder.dialect is not None, "thinking": encoder.think is not None}
        shown["capabilities"] += [ability for ability, has_it in abilities.items() if has_it]
    return json_response(shown, body)


@router.head("/api/version", response_model=None, include_in_schema=False)
@router.get("/api/version", response_model=None)
async def get_version() -> Response:
    """Return the version of Ollama's API, which clients check, and this package's version."""
    return json_response({"version": FOLLOWED, "infer": __version__})


@router.post("/api/pull", response_model=None)
async def pull(body: OllamaNamed, http: Request) -> Response:
    """Report success for a served model; other models are not downloaded."""
    try:
        find_name(server_state(http), body.wanted)
    except UnknownModel as error:
        advice = "this server fetches nothing for clients: its operator starts it with the model"
        raise UnknownModel(f"{error}; {advice}", param="model") from None
    if body.stream is False:
        return json_response({"status": "success"}, body)
    lines = b"".join(orjson.dumps({"status": each}) + b"\n" for each in ("pulling manifest", "success"))
    return Response(lines, headers=ignored_headers(body), media_type=NDJSON)


@router.delete("/api/delete", response_model=None)
@router.post("/api/create", response_model=None)
@router.post("/api/copy", response_model=None)
@router.post("/api/push", response_model=None)
@router.post("/api/blobs/{digest}", response_model=None)
async def refuse_change(http: Request) -> Response:
    """Reject changes to the served models, which only the operator can make."""
    raise RequestError(
        f"{http.url.path[:100]} is not supported: the operator chooses the models when "
        "the server starts or through /admin/models"
    )

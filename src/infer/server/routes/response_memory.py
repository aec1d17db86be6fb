"""Stored responses: `GET` and `DELETE /v1/responses/{id}`, its `input_items`, and how a request uses one.

    previous_response_id    prepends the items of the response's conversation, and its output, to the input
    item_reference          is replaced by an item of a stored response's output

An item's id contains the key of its response (`msg_KEY_0` is from `resp_KEY`), so items need no index.
Instructions are not items: they apply to one response only.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

import orjson
from fastapi import Request, Response

from infer.config.knobs import parse_bytes
from infer.errors import RequestError, UnknownPrevious, UnknownResponse
from infer.server.middleware.auth import key_of
from infer.server.processes.messages import StoredResponse
from infer.server.protocol.errors import spell_path
from infer.server.protocol.responses_to_chat import Item
from infer.server.routes.json_route import check_values, json_response, make_router, server_state

MAX_LISTED = 100
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")
_TEXT_KINDS = {"assistant": "output_text"}  # text types of messages by role; others are input_text

router = make_router()


def owner_of(http: Request) -> str:
    """Return the owner of a request's responses: the hash of its API key; "" if the server has no keys."""
    if not server_state(http).config.api_key:
        return ""
    return hashlib.sha256(key_of(http.scope)).hexdigest()


async def keep(http: Request, response: dict[str, Any], items: list[Item]) -> None:
    """Store a response and its input items, each with an id."""
    key = response["id"].removeprefix("resp_")
    named = [
        item if isinstance(item.get("id"), str) else {**item, "id": f"item_{key}_in{i}"}
        for i, item in enumerate(items)
    ]
    bare = {name: value for name, value in response.items() if name != "output"}
    stored = StoredResponse(*map(orjson.dumps, (bare, response["output"], named)))
    await server_state(http).responses.put(owner_of(http), response["id"], stored)


async def recall(http: Request, previous_id: str) -> list[Item]:
    """Return the conversation up to a stored response, including its output."""
    config = server_state(http).config
    param = "previous_response_id"
    if not config.response_store:
        said = "needs stored responses, and this server stores none (response_store is 0)"
        raise RequestError.about(param, f"{said}; send the whole conversation as input")
    found = await server_state(http).responses.get(owner_of(http), previous_id)
    if found is None:
        raise UnknownPrevious(
            f"previous response with id {previous_id[:80]!r} not found: it was not stored, or is forgotten "
            "or deleted; send the whole conversation as input",
            param=param,
        )
    size = len(found.items) + len(found.output) + len(await http.body())
    if size > parse_bytes(config.max_body_size, "max_body_size"):
        said = f"continues a conversation of {size} bytes, at most {config.max_body_size} are allowed"
        raise RequestError.about(param, f"{said}; begin another one")
    await check_values(found.items)
    return [*orjson.loads(found.items), *orjson.loads(found.output)]


async def resolve(http: Request, items: list[Item]) -> list[Item]:
    """Return the items, with references replaced by stored items."""
    outputs: dict[str, dict[str, Item]] = {}  # items by id, by the key of their response
    sizes: dict[str, int] = {}  # bytes of items, by id
    num_left = parse_bytes((limit := server_state(http).config.max_body_size), "max_body_size")
    made: list[Item] = []
    for i, item in enumerate(items):
        if not is_reference(item):
            made.append(item)
            continue
        item_id = str(item.get("id"))
        match = _ITEM_ID.fullmatch(item_id)
        key = match[1] if match else ""
        if key and key not in outputs:
            found = await server_state(http).responses.get(owner_of(http), f"resp_{key}")
            stored = [] if found is None else orjson.loads(found.output)
            outputs[key] = {each["id"]: each for each in stored}
            await asyncio.sleep(0)  # yields: a list may name many responses
        if item_id not in outputs.get(key, {}):
            said = f"refers to {item_id[:80]!r}, which is not an item of a stored response; send the item"
            raise UnknownResponse.about(spell_path(("input", i)), said)
        made.append(outputs[key][item_id])
        sizes[item_id] = sizes.get(item_id) or len(orjson.dumps(made[-1]))
        num_left -= sizes[item_id]
        if num_left < 0:
            said = f"and the references before it stand for more than {limit}; refer to fewer items"
            raise RequestError.about(spell_path(("input", i)), said)
    return made


def is_reference(item: Any) -> bool:
    """Return True if an item refers to a stored one."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


# -- routes of a stored response -------------------------------------------------------------------


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(response_id: str, http: Request, stream: bool = False) -> Response:
    """Return a stored response, as it was sent."""
    if stream:
        raise RequestError.about("stream", "is true, but a stored response is not streamed; leave it out")
    found = await _find(http, response_id)
    return json_response(orjson.loads(found.response) | {"output": orjson.loads(found.output)})


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(response_id: str, http: Request) -> Response:
    """Delete a stored response; responses that continue it have their own copy of its items."""
    if not await server_state(http).responses.delete(owner_of(http), response_id):
        raise _unknown(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    response_id: str, http: Request, after: str | None = None, limit: int = 20, order: str = "desc"
) -> Response:
    """List the input items of a stored response, including the items of earlier responses."""
    if not 1 <= limit <= MAX_LISTED:
        raise RequestError.about("limit", f"must be in 1..{MAX_LISTED}, got {limit}")
    if order not in ("asc", "desc"):
        raise RequestError.about("order", f"must be 'asc' or 'desc', got {order[:40]!r}")
    items: list[Item] = orjson.loads((await _find(http, response_id)).items)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RequestError.about("after", f"is {after[:80]!r}, which is not an item of this response")
        items = items[ids.index(after) + 1 :]
    listed = [_as_listed(item) for item in items[:limit]]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
    empty = {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": listed, "has_more": len(items) > limit} | empty | ends)


def _as_listed(item: Item) -> Item:
    """Return an item with the defaults of fields that a client may have omitted."""
    listed: Item = {"type": "message"} | item
    if listed["type"] == "message":
        listed.setdefault("status", "completed")
        if isinstance(text := item.get("content"), str):
            kind = _TEXT_KINDS.get(str(item.get("role")), "input_text")
            extra: Item = {"annotations": []} if kind == "output_text" else {}
            listed["content"] = [{"type": kind, "text": text} | extra]
    return listed


async def _find(http: Request, response_id: str) -> StoredResponse:
    found = await server_state(http).responses.get(owner_of(http), response_id)
    if found is None:
        raise _unknown(response_id)
    return found


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(
        f"response with id {response_id[:80]!r} not found: it was not stored, or is forgotten or deleted",
        param="response_id",
    )

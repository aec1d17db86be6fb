"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's newer API, answered as a chat.

A response is stored when it is complete (response_memory.py), before the client sees its end, so that another
one can continue it. A response that fails, or whose client leaves before the end, is not stored. With
`truncation` auto, the oldest items of a prompt that is too long are dropped (truncation.py).

The answer consists of items; the events of a stream are numbered from 0.

    response.created, response.in_progress
    response.output_item.added                    an item: reasoning, a message, or a function call
      response.content_part.added                 its text, unless it is a call
      response.{output_text, reasoning_text, function_call_arguments}.delta ... .done
      response.content_part.done
    response.output_item.done
    response.completed | response.incomplete      the whole response; incomplete: at its limit
    response.failed, error                        instead of the rest, if it fails
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
from fastapi import Request, Response

from infer.errors import ContextOverflow
from infer.finish_reason import FinishReason
from infer.server.protocol.errors import ApiError
from infer.server.protocol.generation import Generation
from infer.server.protocol.logprobs import chat_logprobs
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.responses_to_chat import (
    InputTokensRequest,
    Item,
    ResponsesRequest,
    responses_to_chat,
)
from infer.server.protocol.stream import named_event
from infer.server.protocol.translate import Job
from infer.server.protocol.truncation import find_units
from infer.server.protocol.turns import spelled
from infer.server.routes.json_route import answer, json_response, make_router, open_agent, server_state
from infer.server.routes.response_memory import is_reference, keep, recall, resolve

router = make_router()

Keep = Callable[[dict[str, Any]], Awaitable[None]]  # stores a response

DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


async def open_response(http: Request, body: ResponsesRequest) -> Job:
    """Return the job of a body, after loading the stored items that it continues or refers to."""
    if body.previous_response_id is not None:
        body._history = await recall(http, body.previous_response_id)
    if any(map(is_reference, body.items)) and server_state(http).config.response_store:
        body.input = await resolve(http, body.items)
    items = [*body._history, *body.items]
    open_chat = partial(open_agent, http, body, responses_to_chat, num_items=len(items))
    return await (_open_shortened(body, items, open_chat) if body.truncation == "auto" else open_chat())


async def _open_shortened(
    body: ResponsesRequest, items: list[Item], open_chat: Callable[[], Awaitable[Job]]
) -> Job:
    """Return the job after dropping as few of the oldest items as necessary to make the prompt fit.

    Binary search: the number of renderings is logarithmic in the number of items.
    """
    fitting = await _open_if_it_fits(open_chat)
    if fitting is not None:
        return fitting
    units = find_units(items)
    too_few, enough = 0, len(units)  # numbers of units to drop
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        body._left_out = frozenset(place for unit in units[:middle] for place in unit)
        job = await _open_if_it_fits(open_chat)
        if job is None:
            too_few = middle
        else:
            enough, fitting = middle, job
    if fitting is not None:
        return fitting
    body._left_out = frozenset(place for unit in units for place in unit)
    return await open_chat()  # a prompt that is still too long is rejected as usual


async def _open_if_it_fits(open_chat: Callable[[], Awaitable[Job]]) -> Job | None:
    """Return the job; None if its prompt and the requested tokens do not fit."""
    try:
        job = await open_chat()
    except ContextOverflow:
        return None
    num_tokens = len(job.requests[0].prompt) + (job.params.max_tokens or 1)
    return job if num_tokens <= job.model.encoder.context_len else None


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation."""
    stores = None
    if body.store is not False and server_state(http).config.response_store:
        stores = partial(_store, http, body)
    elif body.store:
        body.note_ignored(["store"])
    return await answer(http, body, open_response(http, body), partial(ResponseWriter, keep=stores))


async def _store(http: Request, body: ResponsesRequest, response: dict[str, Any]) -> None:
    await keep(http, response, [*body._history, *body.items])


@router.post("/v1/responses/input_tokens", response_model=None)
async def count_input_tokens(body: InputTokensRequest, http: Request) -> Response:
    """Return the number of tokens of a conversation's prompt."""
    with spelled(body.spellings):
        job = await open_response(http, body)
    counted = {"object": "response.input_tokens", "input_tokens": len(job.requests[0].prompt)}
    return json_response(counted, body)


class ResponseWriter(PartWriter):
    """OpenAI's response; a stream adds, fills and finishes its items."""

    def __init__(self, generation: Generation, body: ResponsesRequest, *, keep: Keep | None = None) -> None:
        super().__init__(generation, body)
        self._keep = keep
        self._response: dict[str, Any] = {}  # set once it is complete
        self._has_logprobs = generation.job.params.logprobs is not None
        self._num_rows_sent = 0  # logprobs of the open part that were sent
        if self._has_logprobs:
            self.note = lambda piece: list(self.take(piece))
        job, self._num_sent, self._namespaces = generation.job, 0, body._namespaces
        self._key = job.job_id.rpartition("-")[2]
        text = {"format": {"type": "text"}} if body.text is None or body.text.format is None else body.text
        self._constant: dict[str, Any] = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": job.created,
            "model": job.model_name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "store": keep is not None,
            "temperature": job.params.temperature,
            "text": text if isinstance(text, dict) else text.model_dump(exclude_none=True),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": job.params.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }

    def begin(self) -> list[bytes]:
        """Return the response without items, twice: as created, and as in progress."""
        begun = self._at("in_progress", [])
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def open(self, part: Part) -> list[bytes]:
        """Return the events of an empty item, with an empty text in it."""
        self._num_rows_sent = 0
        item = self._item(part, "in_progress")
        frames = [self._event("output_item.added", output_index=part.index, item=item)]
        if part.kind != "call":
            content = self._content(Part(part.kind, part.index))
            frames.append(self._event("content_part.added", **self._place(part), part=content))
        return frames

    def add(self, part: Part, text: str) -> bytes:
        """Return the event of an item's next text."""
        fields = self._logprobs(part, self._num_rows_sent)
        self._num_rows_sent = len(part.rows)
        return self._event(f"{DELTAS[part.kind]}.delta", **self._place(part), delta=text, **fields)

    def close(self, part: Part) -> list[bytes]:
        """Return the events of the whole item."""
        status = "incomplete" if self.finish_reason == FinishReason.LENGTH else "completed"
        place, name = self._place(part), f"{DELTAS[part.kind]}.done"
        if part.kind == "call":
            frames = [self._event(name, **place, name=part.name, arguments=part.text)]
        else:
            frames = [
                self._event(name, **place, text=part.text, **self._logprobs(part)),
                self._event("content_part.done", **place, part=self._content(part)),
            ]
        item = self._item(part, status)
        return [*frames, self._event("output_item.done", output_index=part.index, item=item)]

    def finish(self) -> list[bytes]:
        """Return the event of the whole response."""
        response = self.body()
        return [self._event(response["status"], response=response)]

    def body(self) -> dict[str, Any]:
        """Return the whole response; incomplete, as is its last item, if its limit was reached."""
        is_cut = self.finish_reason == FinishReason.LENGTH
        items = [self._item(part, "completed") for part in self.parts]
        if is_cut:
            items[-1]["status"] = "incomplete"
        response = self._at("incomplete" if is_cut else "completed", items)
        response |= {"usage": self._usage()} | self.generation.metrics()
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response = response
        return response

    async def settle(self) -> None:
        """Store the response, so that a client that has seen its end can continue it."""
        if self._keep is not None:
            await self._keep(self._response)

    @classmethod
    def failure(cls, told: ApiError, number: int = 0) -> bytes:
        """Return the event that makes OpenAI's package raise an error."""
        fields = {"code": "server_error", "message": told.message, "param": told.param}
        event = {"type": "error", "sequence_number": number, **fields, **orjson.loads(told.encode())}
        return named_event("error", orjson.dumps(event))

    def error(self, told: ApiError) -> bytes:
        """Return the failed response, and the event of the error."""
        response = self._at("failed", [self._item(part, "incomplete") for part in self.parts])
        response["error"] = {"code": "server_error", "message": told.message}
        return self._event("failed", response=response) + self.failure(told, self._num_sent)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": self._num_sent, **fields})
        self._num_sent += 1
        return named_event(kind, data)

    def _place(self, part: Part) -> dict[str, Any]:
        """Return the fields that identify an item, and the text in it."""
        place = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind == "call" else place | {"content_index": 0}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """Return a part of the answer as an item; an item in progress is empty."""
        made: dict[str, Any] = {"id": self._item_id(part), "status": status}
        is_open = status == "in_progress"
        match part.kind:
            case "call":
                text = "" if is_open else part.text
                call = {"type": "function_call", "call_id": part.call_id, "name": part.name}
                if part.name in self._namespaces:
                    call["namespace"] = self._namespaces[part.name]
                return made | call | {"arguments": text}
            case "text":
                made |= {"type": "message", "role": "assistant"}
            case "reasoning":
                made |= {"type": "reasoning", "summary": []}
        return made | {"content": [] if is_open else [self._content(part)]}

    def _item_id(self, part: Part) -> str:
        """Return the id of a part's item."""
        return f"{PREFIXES[part.kind]}_{self._key}_{part.index}"

    def _content(self, part: Part) -> dict[str, Any]:
        """Return the content of an item."""
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        return {"type": "output_text", "text": part.text, "annotations": [], **self._logprobs(part)}

    def _logprobs(self, part: Part, first: int = 0) -> dict[str, Any]:
        """Return the logprobs of a text's tokens, from `first` on; other parts have no such field."""
        if part.kind != "text":
            return {}
        rows = part.rows[first:]
        if not rows:
            return {"logprobs": []}
        return {"logprobs": chat_logprobs(self.generation.job.model.encoder.tokenizer, rows)["content"]}

    def _at(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        moment = {"status": status, "output": items, "usage": None, "error": None, "incomplete_details": None}
        return self._constant | moment

    def _usage(self) -> dict[str, Any]:
        counts = self.generation.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens(counts)},
            "total_tokens": counts["total_tokens"],
        }

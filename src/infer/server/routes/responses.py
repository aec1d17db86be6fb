"""`POST /v1/responses`: OpenAI's newer API, as a chat in other words, and without a memory.

    response.created, response.in_progress
    response.output_item.added                    an item: reasoning, a message, or a function call
      response.content_part.added                 its text, if it is no call
      response.{output_text, reasoning_text, function_call_arguments}.delta ... .done
      response.content_part.done
    response.output_item.done
    response.completed | response.incomplete      the whole response; incomplete: its limit was reached
    response.failed, error                        in place of the rest, if it fails

Every event has a number of its own, from 0.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request, Response

from infer.server.protocol.errors import to_api_error
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.responses import ResponsesRequest, responses_to_chat
from infer.server.protocol.stream import Generation, named_event
from infer.server.routes.json_route import answer, make_router, open_agent

router = make_router()

DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@router.post("/v1/responses", response_model=None)
async def create_response(body: ResponsesRequest, http: Request) -> Response:
    """Answer a conversation."""
    return await answer(http, body, open_agent(http, body, body.input, responses_to_chat), ResponseWriter)


class ResponseWriter(PartWriter):
    """OpenAI's response; in a stream, its items are added, filled and done."""

    def __init__(self, generation: Generation, body: ResponsesRequest) -> None:
        super().__init__(generation)
        job, self._num_sent = generation.job, 0
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
            "previous_response_id": None,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "store": False,
            "temperature": job.params.temperature,
            "text": text if isinstance(text, dict) else text.model_dump(exclude_none=True),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": job.params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begin(self) -> list[bytes]:
        """The response without an item, twice: it was created, and it is worked at."""
        begun = self._at("in_progress", [])
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def open(self, part: Part) -> list[bytes]:
        """An empty item, with an empty text in it."""
        item = self._item(part, "in_progress")
        frames = [self._event("output_item.added", output_index=part.index, item=item)]
        if part.kind != "call":
            content = self._content(part.kind, "")
            frames.append(self._event("content_part.added", **self._place(part), part=content))
        return frames

    def add(self, part: Part, text: str) -> bytes:
        """More of an item."""
        return self._event(f"{DELTAS[part.kind]}.delta", **self._place(part), delta=text, **_logprobs(part))

    def close(self, part: Part) -> list[bytes]:
        """The whole item."""
        status = "incomplete" if self.finish_reason == "length" else "completed"
        place, name = self._place(part), f"{DELTAS[part.kind]}.done"
        if part.kind == "call":
            frames = [self._event(name, **place, name=part.name, arguments=part.text)]
        else:
            content = self._content(part.kind, part.text)
            frames = [
                self._event(name, **place, text=part.text, **_logprobs(part)),
                self._event("content_part.done", **place, part=content),
            ]
        item = self._item(part, status)
        return [*frames, self._event("output_item.done", output_index=part.index, item=item)]

    def finish(self) -> list[bytes]:
        """The whole response."""
        response = self.body()
        return [self._event(response["status"], response=response)]

    def body(self) -> dict[str, Any]:
        """The whole response; incomplete if its limit was reached, inside its last item."""
        is_cut = self.finish_reason == "length"
        items = [self._item(part, "completed") for part in self.parts]
        if is_cut:
            items[-1]["status"] = "incomplete"
        response = self._at("incomplete" if is_cut else "completed", items)
        response["usage"] = self._usage()
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    def error(self, error: BaseException) -> bytes:
        """The response that has failed, and the event by which OpenAI's package raises."""
        told = to_api_error(error)
        response = self._at("failed", [self._item(part, "incomplete") for part in self.parts])
        response["error"] = {"code": "server_error", "message": told.message}
        failed = self._event("failed", response=response)
        fields = {"code": "server_error", "message": told.message, "param": told.param}
        number = {"type": "error", "sequence_number": self._num_sent}
        return failed + named_event("error", orjson.dumps(number | fields | orjson.loads(told.encode())))

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": self._num_sent, **fields})
        self._num_sent += 1
        return named_event(kind, data)

    def _place(self, part: Part) -> dict[str, Any]:
        """Which item an event is about, and which text of it."""
        place = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind == "call" else place | {"content_index": 0}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        """A part of the answer as an item; one that is in progress is empty."""
        made: dict[str, Any] = {"id": self._item_id(part), "status": status}
        is_open = status == "in_progress"
        match part.kind:
            case "call":
                text = "" if is_open else part.text
                call = {"type": "function_call", "call_id": part.call_id, "name": part.name}
                return made | call | {"arguments": text}
            case "text":
                made |= {"type": "message", "role": "assistant"}
            case "reasoning":
                made |= {"type": "reasoning", "summary": []}
        return made | {"content": [] if is_open else [self._content(part.kind, part.text)]}

    def _item_id(self, part: Part) -> str:
        """The id of a part's item."""
        return f"{PREFIXES[part.kind]}_{self._key}_{part.index}"

    def _content(self, kind: str, text: str) -> dict[str, Any]:
        """The text of an item."""
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

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


def _logprobs(part: Part) -> dict[str, Any]:
    """Events of a text have a list for logprobs, which is empty here."""
    return {"logprobs": []} if part.kind == "text" else {}

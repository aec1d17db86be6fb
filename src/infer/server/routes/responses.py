"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's newer API, converted to a chat.

    instructions, input items    ──►  messages             turns.py
    tools, tool_choice           ──►  tools, tool_choice   flat here, nested there; namespaces are flattened
    text.format                  ──►  response_format
    reasoning.effort             ──►  reasoning_effort
    max_output_tokens            ──►  max_tokens
    sampling fields              ──►  the same names       `TunedBody`

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

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import orjson
from fastapi import Request, Response
from pydantic import PrivateAttr

from infer.errors import ContextOverflow, RequestError, closest
from infer.finish_reason import FinishReason
from infer.server.protocol.errors import ApiError, Path, spell_path
from infer.server.protocol.generation import Generation
from infer.server.protocol.logprobs import chat_logprobs
from infer.server.protocol.parts import Part, PartWriter, reasoning_tokens
from infer.server.protocol.schemas import (
    ABOUT_THE_CLIENT,
    SAMPLING_NEUTRAL,
    Body,
    ChatRequest,
    CountedChat,
    Int,
    Name,
    Neutral,
    TunedBody,
)
from infer.server.protocol.stream import named_event
from infer.server.protocol.structured import check_has_schema
from infer.server.protocol.translate import Job
from infer.server.protocol.truncation import find_units
from infer.server.protocol.turns import Turns, spelled
from infer.server.routes.json_route import answer, json_response, make_router, open_agent, server_state
from infer.server.routes.response_memory import Item, is_reference, keep, recall, resolve
from infer.tokenizer.chat_template import map_strings

_NOT_KEPT = (
    "this server stores responses, not conversations; send previous_response_id, or everything as input"
)
_NO_STORE = "this server stores no responses (response_store is 0); send the item itself"
_NO_HOSTED_TOOLS = "tools run where the client runs; describe one with type function, name and parameters"
_TEXT_ONLY = "this server reads and writes text"
_DIRECT = Neutral(({"type": "direct"},), _NO_HOSTED_TOOLS)


# -- request bodies --------------------------------------------------------------------------------


class TextPart(Body):
    """Text of a message or of a tool's output."""

    ignored = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    text: str


class RefusalPart(Body):
    """A refusal in an earlier answer, instead of text."""

    refusal: str


class MessageItem(Body):
    """A message of a user, the operator or the assistant."""

    ignored = frozenset({"id", "phase", "status"})

    role: str
    content: str | list[dict[str, Any]]


class FunctionCallItem(Body):
    """A tool call of an earlier answer."""

    ignored = frozenset({"id", "namespace", "parsed_arguments", "status"})
    neutral = {"caller": _DIRECT}

    call_id: str
    name: str
    arguments: str


class CallOutputItem(Body):
    """The result of a tool call."""

    ignored = frozenset({"id", "status"})
    neutral = {"caller": _DIRECT}

    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Body):
    """Reasoning of an earlier answer: its text, or a summary if there is no text."""

    ignored = frozenset({"encrypted_content", "id", "status"})

    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None


class ResponsesTool(Body):
    """A tool that the client runs."""

    ignored = frozenset({"output_schema"})
    elsewhere = {"function": 'tools are flat here: {"type": "function", "name": ..., "parameters": {...}}'}
    neutral = {
        "allowed_callers": Neutral((["direct"],), _NO_HOSTED_TOOLS),
        "defer_loading": Neutral((False,), "all tools are shown to the model"),
    }

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Tools under a common name, which is returned with their calls."""

    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class NamedTool(Body):
    """The tool that must be called."""

    name: str


class TextOptions(Body):
    """The format of the answer's text."""

    where = "text."
    ignored = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    """The amount of reasoning before the answer."""

    where = "reasoning."
    ignored = frozenset({"summary", "generate_summary"})  # reasoning is sent unchanged
    neutral = {"context": Neutral(("auto",), _NOT_KEPT), "mode": Neutral(("standard",), "there is one mode")}

    effort: str | None = None


ITEMS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
PARTS: dict[str, type[Body]] = {"input_text": TextPart, "output_text": TextPart, "refusal": RefusalPart}
REASONING_PARTS: dict[str, type[Body]] = {"reasoning_text": TextPart, "summary_text": TextPart}
REFUSED_ITEMS = {"item_reference": _NO_STORE, "compaction": _NOT_KEPT}
REFUSED_PARTS = dict.fromkeys(("input_image", "input_file", "input_audio"), _TEXT_ONLY)
TOOLS: dict[str, type[Body]] = {"function": ResponsesTool, "namespace": NamespaceTool}
HOSTED_TOOL = re.compile(  # types of tools that OpenAI defines; some end in a date
    "(apply_patch|code_interpreter|computer(?:_use(?:_preview)?)?|file_search|image_generation|local_shell"
    "|mcp|programmatic_tool_calling|shell|tool_search|web_search(?:_preview)?)[_0-9]*"
)
ROLES = ("user", "assistant", "system", "developer")
WITH_LOGPROBS = "message.output_text.logprobs"
INCLUDED_ANYWAY = frozenset({  # values of `include` without effect: always sent, or of hosted tools
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
})  # fmt: skip


class ResponseStreamOptions(Body):
    """Options for what a stream has in addition to its events."""

    where = "stream_options."
    neutral = {"include_obfuscation": Neutral((False,), "events are not padded")}


class ResponsesRequest(TunedBody):
    """`POST /v1/responses`."""

    neutral = SAMPLING_NEUTRAL | {
        "background": Neutral((False,), "an answer comes on the connection that asked for it"),
        "context_management": Neutral(([],), _NOT_KEPT),
        "conversation": Neutral((), _NOT_KEPT),
        "moderation": Neutral((), "this server does not moderate"),
        "prompt": Neutral((), "this server stores no prompts; send instructions and input"),
    }
    # max_tool_calls counts calls of hosted tools, and there are none
    ignored = (ABOUT_THE_CLIENT - {"metadata", "store", "user"}) | {"client_metadata", "max_tool_calls"}
    elsewhere = {
        "max_tokens": "this route takes max_output_tokens",
        "messages": "messages go to /v1/chat/completions, this route takes input",
        "prompt": "plain prompts go to /v1/completions, this route takes input",
        "response_format": "this route takes text.format",
    }
    renamed = {
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    is_answered: ClassVar[bool] = True  # a model answers it: every tool result follows its call

    input: str | list[Item]
    previous_response_id: Name | None = None
    store: bool | None = None  # null: true, if the server stores responses
    truncation: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    max_output_tokens: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    _namespaces: dict[str, str] = PrivateAttr(default_factory=dict)  # namespaces of functions, by name
    _history: list[Item] = PrivateAttr(default_factory=list)  # conversation that it continues
    _left_out: frozenset[int] = PrivateAttr(default=frozenset())  # indices of items that do not fit

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input


class InputTokensRequest(ResponsesRequest):
    """`POST /v1/responses/input_tokens`: a body whose prompt is only counted; it may lack earlier turns."""

    is_answered = False
    ignored = ResponsesRequest.ignored | {"personality"}

    input: str | list[Item] | None = None  # type: ignore[assignment]  # may be absent

    @property
    def items(self) -> list[Item]:
        """The input as items; there may be none."""
        return [] if self.input is None else super().items


# -- conversion to a chat --------------------------------------------------------------------------


def responses_to_chat(body: ResponsesRequest) -> ChatRequest:
    """Convert a body to a chat; raises a `RequestError` that names the field of this API."""
    turns = Turns(is_answered=body.is_answered)
    if body.instructions is not None:
        turns.say("system", body.instructions)
    num_history = len(body._history)
    for i, item in enumerate(body._history):
        if i not in body._left_out:
            _add_item(turns, item, ("previous_response_id", i))
    turns.ignored.clear()  # fields of stored items were reported before
    for i, item in enumerate(body.items):
        if num_history + i not in body._left_out:
            _add_item(turns, item, ("input", i))
    fields: dict[str, Any] = {"messages": turns.messages(), "max_tokens": body.max_output_tokens}
    for value in (body.items, body.tools, body.tool_choice):
        map_strings(value, str)  # checks the depth of what is stored or sent back, used by a template or not
    if body.tools:
        fields["tools"] = list(_functions(turns, body, body.tools, ("tools",)))
    if isinstance(body.tool_choice, dict) and body.tool_choice.get("type") != "allowed_tools":
        named = turns.read(
            {"function": NamedTool}, body.tool_choice, ("tool_choice",), refused=_NO_HOSTED_TOOLS
        )
        fields["tool_choice"] = {"type": "function", "function": {"name": named.name}}
    else:
        fields["tool_choice"] = body.tool_choice
    if body.text is not None:
        turns.ignored |= {f"text.{name}": None for name in body.text.ignored_fields}
        if body.text.format is not None:
            fields["response_format"] = _format(body.text.format)
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        turns.ignored |= {f"reasoning.{name}": None for name in body.reasoning.ignored_fields}
    for kind in body.include or ():
        if kind in INCLUDED_ANYWAY:
            turns.ignored["include"] = None
        elif kind != WITH_LOGPROBS:
            hint = closest(kind[:80], sorted(INCLUDED_ANYWAY | {WITH_LOGPROBS}), listed="allowed")
            raise RequestError.about("include", f"has {kind[:80]!r}{hint}")
    if WITH_LOGPROBS in (body.include or ()) or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.truncation not in (None, "auto", "disabled"):
        raise RequestError.about("truncation", f"must be 'auto' or 'disabled', got {body.truncation[:40]!r}")
    for name in (*TunedBody.model_fields, "chat_template_kwargs", "parallel_tool_calls"):
        fields[name] = getattr(body, name)
    body.note_ignored(turns.ignored)
    chat = ChatRequest if body.is_answered else CountedChat
    return chat.model_validate({name: value for name, value in fields.items() if value is not None})


def _add_item(turns: Turns, given: Any, path: Path) -> None:
    match turns.read(ITEMS, given, path, refused=REFUSED_ITEMS, default="message"):
        case MessageItem(role=role, content=content):
            if role not in ROLES:
                where = spell_path((*path, "role"))
                raise RequestError.about(where, f"is {role[:40]!r}, allowed are {', '.join(ROLES)}")
            for text in _texts(turns, content, (*path, "content")):
                turns.say("system" if role == "developer" else role, text)
        case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
            turns.call(call_id, name, arguments)
        case CallOutputItem(call_id=call_id, output=output):
            text = "\n".join(_texts(turns, output, (*path, "output")))
            turns.answer_call(call_id, text, (*path, "call_id"))
        case ReasoningItem(content=content, summary=summary):
            which = "content" if content else "summary"
            for text in _texts(turns, content or summary or [], (*path, which), REASONING_PARTS):
                turns.think(text)


def _texts(
    turns: Turns, content: str | list[dict[str, Any]], path: Path, kinds: Mapping[str, type[Body]] = PARTS
) -> list[str]:
    """Return the texts of a list of parts."""
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for i, given in enumerate(content):
        match turns.read(kinds, given, (*path, i), refused=REFUSED_PARTS):
            case TextPart(text=text) | RefusalPart(refusal=text):
                texts.append(text)
    return texts


def _functions(
    turns: Turns, body: ResponsesRequest, tools: list[dict[str, Any]], path: Path, namespace: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the functions of a list of tools and of its namespaces, without hosted tools.

    A hosted tool is reported as ignored; with `required`, which may need it, it is rejected.
    """
    for i, given in enumerate(tools):
        hosted = HOSTED_TOOL.fullmatch(str(given.get("type")))
        if hosted and body.tool_choice != "required":
            turns.ignored[f"tools.{hosted[1]}"] = None
            continue
        match turns.read(TOOLS, given, (*path, i), refused=_NO_HOSTED_TOOLS):
            case NamespaceTool(name=name, tools=inner, description=description):
                if description:
                    turns.ignored["tools.namespace.description"] = None
                yield from _functions(turns, body, inner, (*path, i, "tools"), name)
            case ResponsesTool() as tool:
                if namespace:
                    body._namespaces[tool.name] = namespace
                yield {"type": "function", "function": tool.model_dump(exclude_none=True)}


def _format(given: dict[str, Any]) -> dict[str, Any]:
    """Return the format for a chat, where a schema is nested one level deeper."""
    if given.get("type") != "json_schema":
        return given
    check_has_schema(given, "text.format", '"name": ..., "schema": {...}')
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


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


# -- responses -------------------------------------------------------------------------------------

router = make_router()

Keep = Callable[[dict[str, Any]], Awaitable[None]]  # stores a response

DELTAS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


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

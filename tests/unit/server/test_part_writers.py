"""Events of answers as the streams of two APIs: read by their own packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import hypothesis.strategies as st
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from infer.dialects.events import AnswerEvent, CallDelta, CallStart, ContentDelta, ReasoningDelta, TextDelta
from infer.errors import EngineError
from infer.finish_reason import FinishReason
from infer.sampling.params import SamplingParams
from infer.scheduling.request import StepOutput
from infer.server.protocol.errors import to_api_error
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.messages_to_chat import MessagesRequest
from infer.server.protocol.parts import Part, PartWriter, place
from infer.server.protocol.responses_to_chat import ResponsesRequest
from infer.server.routes.messages import MessageWriter
from infer.server.routes.responses import ResponseWriter

MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class FakeJob:
    job_id = "chatcmpl-0123"
    created = 1_700_000_000
    model_name = "fake"
    params = SamplingParams(max_tokens=100)


class FakeGeneration:
    job = FakeJob()

    def metrics(self) -> dict[str, Any]:
        return {}

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 9,
            "completion_tokens": 7,
            "total_tokens": 16,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        }


GENERATION = cast(Generation, FakeGeneration())

texts = st.text(min_size=1, max_size=8)
arguments = st.dictionaries(texts, st.one_of(st.integers(), texts, st.lists(st.booleans())), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[list[AnswerEvent]]:
    """The events of an answer, one list for each piece; some pieces show nothing."""
    events: list[AnswerEvent] = [ReasoningDelta(text) for text in draw(st.lists(texts, max_size=3))]
    events += [ContentDelta(text) for text in draw(st.lists(texts, max_size=3))]
    for index in range(draw(st.integers(0, 3))):
        events.append(CallStart(index, f"call_{index}", draw(st.sampled_from(["f", "get_weather"]))))
        whole = json.dumps(draw(arguments))
        cut = draw(st.integers(0, len(whole)))
        events += [CallDelta(index, piece) for piece in (whole[:cut], whole[cut:])]
        if draw(st.booleans()):
            events.append(ContentDelta(draw(texts)))
    pieces: list[list[AnswerEvent]] = [[]]
    for event in events:
        if draw(st.booleans()):
            pieces.append([])
        pieces[-1].append(event)
    return pieces


def stream(
    writer: PartWriter, pieces: Sequence[Sequence[AnswerEvent]], finish_reason: str = "stop"
) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream by name."""
    frames: list[bytes] = []
    for i, events in enumerate(pieces):
        reason = finish_reason if i == len(pieces) - 1 else None
        frames += writer.frames(piece_of(events, reason))
    return read(b"".join([*frames, *writer.end()]))


def piece_of(events: Sequence[AnswerEvent], finish_reason: str | None = None) -> Piece:
    text = "".join(event.text for event in events if isinstance(event, ContentDelta))
    delta = TextDelta(
        text=text,
        token_ids=(1,),
        finish_reason=FinishReason(finish_reason) if finish_reason else None,
        events=tuple(events),
    )
    return Piece(0, StepOutput("r", 0, (1,)), delta)


def parts_of(pieces: Sequence[Sequence[AnswerEvent]]) -> list[Part]:
    parts: list[Part] = []
    for event in (event for piece in pieces for event in piece):
        place(event, parts)
    return parts or [Part("text", 0)]


def read(frames: bytes) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in frames.decode().split("\n\n")[:-1]]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]
    assert all(name == data["type"] for name, data in found)
    return found


def message(parts: list[Part], finish_reason: str, stop_reason: str | int | None = None) -> dict[str, Any]:
    writer = MessageWriter(GENERATION, MessagesRequest(messages=[], max_tokens=1))
    writer.parts, writer.finish_reason, writer.stop_reason = parts, FinishReason(finish_reason), stop_reason
    return writer.body()


def response_writer() -> ResponseWriter:
    return ResponseWriter(GENERATION, ResponsesRequest(input="hi"))


@given(pieces=answers(), finish_reason=st.sampled_from(["stop", "length"]))
def test_a_stream_of_blocks_adds_up_to_the_message(
    pieces: list[list[AnswerEvent]], finish_reason: str
) -> None:
    events = stream(
        MessageWriter(GENERATION, MessagesRequest(messages=[], max_tokens=1)), pieces, finish_reason
    )
    parts = parts_of(pieces)
    whole = message(parts, finish_reason)
    Message.model_validate(whole, strict=True)

    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    snapshot = None
    buffers: dict[int, bytes] = {}
    for name, data in events:
        if name != "ping":
            event = MESSAGE_EVENT.validate_python(data, strict=True)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    assert snapshot.to_dict(exclude_unset=False, exclude_none=True) | {
        "content": None
    } == Message.model_validate(whole).to_dict(exclude_unset=False, exclude_none=True) | {"content": None}
    assert [
        {name: value for name, value in block.to_dict().items() if name != "parsed_output"}
        for block in snapshot.content
    ] == whole["content"]
    open_block = None
    for name, data in events:  # one block at a time, in order
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
        elif name.startswith("content_block"):
            assert data["index"] == open_block
            open_block = None if name == "content_block_stop" else open_block
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]


@given(pieces=answers(), finish_reason=st.sampled_from(["stop", "length"]))
def test_a_stream_of_items_adds_up_to_the_response(
    pieces: list[list[AnswerEvent]], finish_reason: str
) -> None:
    events = stream(response_writer(), pieces, finish_reason)
    other = response_writer()
    parts = other.parts = parts_of(pieces)
    other.finish_reason = FinishReason(finish_reason)
    whole = other.body()
    Response.model_validate(whole, strict=True)

    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=cast(Any, None))
    state._text_format = cast(Any, __import__("openai")._types.omit)
    done: list[dict[str, Any]] = []
    for name, data in events:
        state.handle_event(RESPONSE_EVENT.validate_python(data, strict=True))
        if name == "response.output_item.done":
            assert data["output_index"] == len(done)
            done.append(data["item"])
    assert done == whole["output"]
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1][0] == ("response.incomplete" if finish_reason == "length" else "response.completed")
    assert events[-1][1]["response"] == whole
    joined = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
    for part in parts:
        mine = [data for _, data in events if data.get("output_index") == part.index]
        deltas = [data["delta"] for data in mine if data["type"] == f"response.{joined[part.kind]}.delta"]
        assert "".join(deltas) == part.text


def test_the_events_of_a_response_are_those_of_openai() -> None:
    pieces: list[list[AnswerEvent]] = [
        [ReasoningDelta("hm")],
        [ContentDelta("a")],
        [CallStart(0, "call_0", "f"), CallDelta(0, "{}")],
    ]
    assert [name.removeprefix("response.") for name, _ in stream(response_writer(), pieces)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_reasons_to_stop() -> None:
    text, call = Part("text", 0), Part("call", 1, "call_0", "f", ["{}"])
    assert message([text], "stop")["stop_reason"] == "end_turn"
    assert message([text], "length")["stop_reason"] == "max_tokens"
    assert message([text, call], "stop")["stop_reason"] == "tool_use"
    assert message([text, call], "length")["stop_reason"] == "max_tokens"
    for arguments in ('{"a": ', '{"a": ' + "1" * 400 + "}"):  # cut short; of no number that can be written
        met = message([Part("call", 1, "call_0", "f", [arguments])], "stop", "x")
        assert (met["stop_reason"], met["stop_sequence"]) == ("stop_sequence", "x")
        assert [block["type"] for block in met["content"]] == ["text"]
    assert message([text], "stop", 7)["stop_reason"] == "end_turn"
    met = message([text], "stop", "###")
    assert (met["stop_reason"], met["stop_sequence"]) == ("stop_sequence", "###")


def test_a_response_that_fails_says_so_twice() -> None:
    """Once with the response, for programs that read it, and once as what OpenAI's package raises."""
    writer = response_writer()
    num_before = len(read(b"".join(writer.frames(piece_of([ContentDelta("half an ans")])))))
    (failed, failure), (kind, error) = read(writer.error(to_api_error(EngineError("the engine fell over"))))
    assert (failed, kind) == ("response.failed", "error")
    RESPONSE_EVENT.validate_python(failure, strict=True)
    RESPONSE_EVENT.validate_python(error, strict=True)
    assert failure["response"]["error"]["message"] == error["message"] == "the engine fell over"
    assert failure["response"]["output"][0]["content"][0]["text"] == "half an ans"
    assert [failure["sequence_number"], error["sequence_number"]] == [num_before, num_before + 1]
    assert error["error"]["message"] == "the engine fell over"

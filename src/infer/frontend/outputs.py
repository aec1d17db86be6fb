"""Turn the engine's token ids into text: pieces as they come, then the whole answer.

    StepOutput ──► OutputBuilder ──► TextDelta ...            (streaming)
                        └──────────► RequestOutput            (at the end)

Both come from the same detokenizer, so the joined pieces equal the answer, byte for byte. Stop strings are
found here, because this is the first code that knows text; the builder then names the sequence that the
engine may stop.

An answer that may hold reasoning or tool calls has an `AnswerFormat`, and each of its sequences has a parser.
`text` is then the answer without reasoning and calls, and `events` has all three in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.dialects.answer import AnswerFormat
from infer.dialects.events import AnswerEvent, ContentDelta, ReasoningDelta, TextDelta, ToolCall, join_calls
from infer.dialects.parser import AnswerParser
from infer.errors import RequestError
from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs, SamplingParams
from infer.scheduling.request import DraftCounts, Request, StepOutput
from infer.tokenizer.detokenizer import Detokenizer
from infer.tokenizer.tokenizer import Tokenizer


def check_streams(params: SamplingParams, advice: str) -> None:
    """Refuse to stream an answer that is only chosen at the end; the message ends with `advice`."""
    if params.use_beam_search or params.num_sequences != params.n:
        raise RequestError(
            f"best_of and beam search choose at the end, so they cannot stream; {advice}",
            param="use_beam_search" if params.use_beam_search else "best_of",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str  # the answer without reasoning and tool calls, if these are parsed
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    logprobs: list[RowLogprobs] | None = None
    cumulative_logprob: float | None = None  # known if logprobs, best_of or beams asked for it
    reasoning: str | None = None  # the text that the model wrote for itself
    tool_calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0
    drafts: DraftCounts | None = None  # counts of its proposed and accepted drafts, if it had any
    events: tuple[AnswerEvent, ...] = field(default=(), repr=False, compare=False)  # streamed events


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None  # the text as given; None if the caller gave token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[RowLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def reasoning(self) -> str | None:
        """The reasoning before the first output; None if the model did not reason."""
        return self.outputs[0].reasoning

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens of the first output that are reasoning."""
        return self.outputs[0].num_reasoning_tokens

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first output."""
        return self.outputs[0].tool_calls

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the first output ended: "stop", "tool_calls" or "length"."""
        return self.outputs[0].finish_reason

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first output."""
        return self.outputs[0].token_ids

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "num_cached_tokens": self.num_cached_tokens,
            "prompt_logprobs": _plain_rows(self.prompt_logprobs),
            "outputs": [
                {
                    "index": output.index,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                    "logprobs": _plain_rows(output.logprobs),
                    "cumulative_logprob": output.cumulative_logprob,
                    "reasoning": output.reasoning,
                    "speculative_decoding": None if output.drafts is None else output.drafts.to_wire(),
                    "tool_calls": [
                        {"id": call.call_id, "name": call.name, "arguments": call.arguments}
                        for call in output.tool_calls
                    ],
                }
                for output in self.outputs
            ],
        }


def _plain_rows(rows: Sequence[RowLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """Logprobs as plain data; minus infinity, which JSON cannot hold, is null."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            "token_id": row.token_id,
            "logprob": _finite(row.logprob),
            "rank": row.rank,
            "top": [{"token_id": token_id, "logprob": _finite(logprob)} for token_id, logprob in row.top],
        }
        for row in rows
    ]


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


class _SequenceText:
    """The text of one sequence so far."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, prompt_ids: tuple[int, ...], form: AnswerFormat | None
    ) -> None:
        self._request = request
        self._form = form
        self._parser = AnswerParser(form) if form is not None else None
        shown = form.shown_ids if form is not None else frozenset()
        self._stop = self._next_stop(0)
        self._detokenizer = Detokenizer(tokenizer, stop=self._stop, prompt_ids=prompt_ids, shown=shown)
        # Most outputs are only a token.
        self._is_plain = (
            not request.params.stop and form is None and request.params.num_sequences == request.params.n
        )
        self.events: list[AnswerEvent] = []
        self.num_reasoning = 0
        self._pieces: list[str] = []
        self._text, self._new = "", list[AnswerEvent]()  # text and events of the current step
        self.token_ids: list[int] = []
        self.logprobs: list[RowLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.drafts: DraftCounts | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def _next_stop(self, num_tokens: int) -> Sequence[str]:
        """The active stop strings: none before min_tokens, none in reasoning."""
        params = self._request.params
        is_hidden = self._parser is not None and self._parser.is_hidden
        return () if num_tokens < params.min_tokens or is_hidden else params.stop

    def take(self, output: StepOutput) -> TextDelta:
        if output.finish_reason is None and self._is_plain and not output.logprobs:
            self.token_ids += output.token_ids
            text = self._detokenizer.push(output.token_ids)
            self._pieces.append(text)
            return TextDelta(text=text, token_ids=output.token_ids, index=output.index)
        self._text, self._new = "", []
        num_taken, num_reasoning = self._read(output.token_ids)
        for row in output.logprobs[:num_taken]:
            self.logprobs.append(row)
            self.cumulative_logprob += row.logprob
        if not self.logprobs:  # a beam, which has only the logprob of the whole
            self.cumulative_logprob = output.cumulative_logprob
        self.drafts = output.drafts or self.drafts
        self._end(output)
        self.num_reasoning += num_reasoning
        self._pieces.append(self._text)
        return TextDelta(
            text=self._text,
            token_ids=output.token_ids[:num_taken],
            finish_reason=self.finish_reason,
            index=output.index,
            logprobs=output.logprobs[:num_taken],
            error=output.error,
            stop_reason=self.stop_reason,
            events=tuple(self._new),
            num_reasoning=num_reasoning,
        )

    def _read(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Add tokens up to the end of the answer; returns their number, and how many are reasoning."""
        parser, num_taken, num_reasoning = self._parser, 0, 0
        for token_id in token_ids:
            self.token_ids.append(token_id)
            num_taken += 1
            was_reasoning = parser is not None and parser.is_reasoning
            self._add(self._detokenizer.push((token_id,)))
            num_reasoning += was_reasoning or (parser is not None and parser.is_reasoning)
            if self._request.params.stop and self._stop != (stop := self._next_stop(len(self.token_ids))):
                self._stop = stop
                self._add(self._detokenizer.look_for(stop))
            if self._detokenizer.stopped is not None or (parser is not None and parser.is_done):
                break
        return num_taken, num_reasoning

    def _add(self, piece: str) -> None:
        """Add text of the current step, which a parser turns into events."""
        if self._parser is None:
            self._text += piece
        else:
            self._add_events(self._parser.push(piece))

    def _add_events(self, events: list[AnswerEvent]) -> None:
        self._new += events
        self._text += "".join([event.text for event in events if isinstance(event, ContentDelta)])

    def _end(self, output: StepOutput) -> None:
        """End the answer at a stop string, at the last call allowed, or where the engine has ended it."""
        if self._detokenizer.stopped is not None:
            self._add(self._stop_at(self._detokenizer.stopped))
        elif self._parser is not None and self._parser.is_done:
            self.finish_reason = FinishReason.STOP
        elif output.finish_reason is not None:
            rest = self._detokenizer.finish()
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            if self._detokenizer.stopped is not None:  # the text held back was a stop string
                rest += self._stop_at(self._detokenizer.stopped)
            self._add(rest)
        if self._parser is not None and self.finish_reason is not None:
            is_cut = self.finish_reason == FinishReason.LENGTH or self.stop_reason is not None
            self._add_events(self._parser.finish(is_cut=is_cut))
        self.events += self._new
        if self._form is not None and self.finish_reason is not None:
            self.finish_reason = self._form.finish_reason(self.finish_reason, join_calls(self.events))

    def _stop_at(self, stop: str) -> str:
        """End at a stop string; returns it if the text should include it."""
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        return stop if self._request.params.include_stop_str_in_output else ""

    def build(self, index: int, *, has_logprobs: bool, has_cumulative: bool) -> CompletionOutput:
        reasoning = "".join(event.text for event in self.events if isinstance(event, ReasoningDelta))
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs if has_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if has_cumulative else None,
            reasoning=reasoning or None,
            tool_calls=join_calls(self.events),
            num_reasoning_tokens=self.num_reasoning,
            drafts=self.drafts,
            events=tuple(self.events),
        )


class OutputBuilder:
    """The outputs of one request so far, as text. Belongs to the request's reader."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        prompt: str | None,
        *,
        is_chat: bool = False,
        form: AnswerFormat | None = None,
    ) -> None:
        """Collect outputs for `request`; the answer in a chat begins a text and does not continue the prompt.

        With a format each sequence gets a parser.
        """
        self.request = request
        self._prompt = prompt
        continued = () if is_chat else request.prompt
        num_lines = request.params.num_reported
        self._lines = [_SequenceText(tokenizer, request, continued, form) for _ in range(num_lines)]
        self._num_cached = 0
        self._prompt_logprobs: list[RowLogprobs | None] | None = None

    def take(self, output: StepOutput) -> tuple[TextDelta | None, bool]:
        """Add a step's output; returns the piece to show, and True if the engine can stop this sequence."""
        line = self._lines[output.index]
        if line.finish_reason is not None:
            return None, False
        self._num_cached = max(self._num_cached, output.num_cached)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = list(output.prompt_logprobs)
        delta = line.take(output)
        return delta, delta.finish_reason is not None and output.finish_reason is None

    @property
    def is_finished(self) -> bool:
        """True if every output has ended."""
        return all(line.finish_reason is not None for line in self._lines)

    def build(self) -> RequestOutput:
        """The whole answer: the n likeliest of the `best_of` sequences, by mean logprob per token."""
        params = self.request.params
        ranked = self._lines
        if len(ranked) > params.n:
            ranked = sorted(ranked, key=lambda line: -line.cumulative_logprob / max(len(line.token_ids), 1))
        knows_logprob = (
            params.logprobs is not None or params.num_sequences > params.n or params.use_beam_search
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt),
            num_cached_tokens=self._num_cached,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[
                line.build(index, has_logprobs=params.logprobs is not None, has_cumulative=knows_logprob)
                for index, line in enumerate(ranked[: params.n])
            ],
        )

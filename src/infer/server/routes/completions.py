"""`POST /v1/completions`: continue a text; `/v1/completions/stream`: the same, with named events.

A body may have several prompts and ask for n outputs of each; the choices of prompt p are p*n ... p*n+n-1.

    event: token    {"text", "id", "index"}        one per token, in order
    event: done     {"finish_reason", "usage", ..}  exactly one of these two
    event: error    {"error": ..}                   ends the stream
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import Request, Response

from infer.errors import RequestError
from infer.finish_reason import FinishReason
from infer.frontend.outputs import CompletionOutput, RequestOutput
from infer.sampling.params import RowLogprobs
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.logprobs import CompletionLogprobs, join, prompt_logprobs
from infer.server.protocol.schemas import CompletionRequest
from infer.server.protocol.stream import ChunkWriter, FrameWriter, job_fields, named_event
from infer.server.protocol.translate import Job, open_completion
from infer.server.routes.json_route import answer, make_router, server_state
from infer.tokenizer.detokenizer import Detokenizer

router = make_router()


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, http: Request) -> Response:
    """Continue one or several prompts."""
    return await answer(http, body, open_completion(body, server_state(http)), CompletionWriter)


@router.post("/v1/completions/stream", response_model=None)
async def stream_completion(body: CompletionRequest, http: Request) -> Response:
    """Continue prompts as a stream of named events."""
    if body.stream is False:
        raise RequestError("this route always streams; leave stream out", param="stream")
    if body.echo:
        raise RequestError("this route sends new tokens only; leave echo out", param="echo")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise RequestError(
            "this route sends usage once, with its done event; leave continuous_usage_stats out",
            param="stream_options.continuous_usage_stats",
        )
    body.stream = True
    if body.return_token_ids:
        body.note_ignored(["return_token_ids"])  # every event has its token's id
    return await answer(http, body, open_completion(body, server_state(http)), EventWriter)


class CompletionView:
    """A job's outputs as the client sees them: echoed prompts, logprobs, choice numbers."""

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        self.job = job
        self.echoes = bool(body.echo)
        self.shows_output = body.max_tokens != 0
        self._has_ids = bool(body.return_token_ids)
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._tokenizer = job.model.encoder.tokenizer
        self._logprobs: list[CompletionLogprobs] | None = None
        if body.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(self._tokenizer, prompt_ids=() if self.echoes else request.prompt)
                for request in job.requests
                for _ in range(job.params.n)
            ]

    @property
    def num_choices(self) -> int:
        """The number of choices that the client gets."""
        return len(self.job.requests) * self.job.params.n

    def choice(self, prompt: int, index: int) -> int:
        """Return the number of a prompt's output among all choices."""
        return prompt * self.job.params.n + index

    def prompt_text(self, prompt: int) -> str:
        """Return the text to echo: as sent, or decoded from ids up to the last complete character."""
        text = self.job.prompts[prompt]
        if text is not None:
            return text
        return Detokenizer(self._tokenizer).push(self.job.requests[prompt].prompt)

    def prompt_logprobs(
        self, choice: int, prompt: int, rows: Sequence[RowLogprobs | None] | None
    ) -> dict[str, Any] | None:
        """Return the logprobs of an echoed prompt."""
        if self._logprobs is None:
            return None
        ids = self.job.requests[prompt].prompt
        return self._logprobs[choice].take(ids, rows or [None] * len(ids))

    def logprobs(self, choice: int, ids: Sequence[int], rows: Sequence[RowLogprobs]) -> dict[str, Any] | None:
        """Return the logprobs of some tokens of an output."""
        return None if self._logprobs is None else self._logprobs[choice].take(ids, rows)

    def whole(self, prompt: int, answer: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        """Return a choice of an answer that is not streamed."""
        choice = self.choice(prompt, output.index)
        text, logprobs = "", None
        if self.echoes:
            text = self.prompt_text(prompt)
            logprobs = self.prompt_logprobs(choice, prompt, answer.prompt_logprobs)
        if self.shows_output:
            text += output.text
            made = self.logprobs(choice, output.token_ids, output.logprobs or ())
            logprobs = join(logprobs, made) if logprobs is not None and made is not None else made
        made_choice = {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason if self.shows_output else FinishReason.LENGTH,
            "stop_reason": output.stop_reason if self.shows_output else None,
        }
        if self._has_prompt_logprobs:
            rows = answer.prompt_logprobs or ()
            made_choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, answer.prompt_token_ids, rows)
        if self._has_ids:
            made_choice["prompt_token_ids"] = answer.prompt_token_ids
            made_choice["token_ids"] = output.token_ids if self.shows_output else []
        return made_choice


class CompletionWriter(ChunkWriter):
    """OpenAI's format: in a stream, the echoed prompt on request, a data frame per token, then [DONE]."""

    kind, opening, closing = "text_completion", b'"text":', b""

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        view = self._view = CompletionView(generation.job, body)
        super().__init__(generation, body, num_choices=view.num_choices)
        self._not_echoed = set(range(view.num_choices)) if view.echoes else set()
        self._not_begun = set(range(view.num_choices)) if self.has_ids else set()

    def last_usage(self) -> Mapping[str, Any]:
        """Return the usage at the end, without a sampled token that is not sent."""
        return self.generation.usage(None if self._view.shows_output else 0)

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        choices = [
            self._view.whole(prompt, answer, output)
            for prompt, answer in enumerate(answers)
            for output in answer.outputs
        ]
        rest = {"choices": choices, "usage": self.last_usage()} | self.generation.metrics()
        return job_fields(self.generation.job, self.kind) | rest

    def is_slow(self, piece: Piece) -> bool:
        """Return True for the first piece of a choice whose prompt is echoed: the prompt may be long."""
        waiting = self._not_echoed
        return bool(waiting) and self._view.choice(piece.prompt, piece.delta.index) in waiting

    def frames(self, piece: Piece) -> list[bytes]:
        """Return the frame of one token; before a choice's first one, also its echoed prompt."""
        view, delta = self._view, piece.delta
        choice = view.choice(piece.prompt, delta.index)
        frames = []
        if choice in self._not_echoed:
            self._not_echoed.remove(choice)
            logprobs = view.prompt_logprobs(choice, piece.prompt, piece.output.prompt_logprobs)
            reason, num_output = (None, None) if view.shows_output else (FinishReason.LENGTH, 0)
            text = self.text(view.prompt_text(piece.prompt))
            frames.append(self.frame(choice, text, logprobs, reason, num_output=num_output))
        if view.shows_output:
            logprobs = view.logprobs(choice, delta.token_ids, delta.logprobs)
            prompt_ids = view.job.requests[piece.prompt].prompt if choice in self._not_begun else None
            self._not_begun.discard(choice)
            frames.append(self.token(choice, delta, logprobs, prompt_ids))
        return frames


class EventWriter(FrameWriter):
    """Named events: one for each token, then one for the end of all choices."""

    def __init__(self, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(generation, body)
        self._view = CompletionView(generation.job, body)
        self._ends: dict[int, dict[str, Any]] = {}

    def frames(self, piece: Piece) -> list[bytes]:
        """Return a `token` event, if the piece has a token."""
        delta, frames = piece.delta, []
        choice = self._view.choice(piece.prompt, delta.index)
        for token_id in delta.token_ids:
            event: dict[str, Any] = {"text": delta.text, "id": token_id, "index": choice}
            logprobs = self._view.logprobs(choice, delta.token_ids, delta.logprobs)
            if logprobs is not None and logprobs["token_logprobs"]:
                event["logprob"] = logprobs["token_logprobs"][0]
                event["top_logprobs"] = logprobs["top_logprobs"][0] if logprobs["top_logprobs"] else {}
            frames.append(named_event("token", orjson.dumps(event)))
        if delta.finish_reason is not None:
            reasons = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            self._ends[choice] = {"index": choice, **reasons}
        return frames

    def end(self) -> list[bytes]:
        """Return the `done` event."""
        ends = self._ends
        content = {
            "id": self.generation.job.job_id,
            "model": self.generation.job.model_name,
            "finish_reason": ends[0]["finish_reason"],
            "choices": [ends[choice] for choice in sorted(ends)],
            "usage": self.generation.usage(),
            **self.generation.metrics(),
        }
        return [named_event("done", orjson.dumps(content))]

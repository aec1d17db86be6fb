"""Turn the body of an HTTP request into requests for the engine.

    body ──► SamplingParams ──┐
         └─► prompts ──► ids ─┴──► one Request per prompt ──► Job

Missing fields come from the model's defaults (generation_config.json), then from `SamplingParams`. Rendering
and tokenizing a long prompt takes milliseconds, so both happen in a thread.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.dialects.answer import EFFORTS, AnswerFormat
from infer.errors import RequestError
from infer.frontend.outputs import check_streams
from infer.frontend.prompts import PromptEncoder
from infer.sampling.params import SamplingParams, check_int
from infer.scheduling.request import Request
from infer.server.protocol.schemas import (
    ChatRequest,
    CompletionRequest,
    Prompts,
    ReadingBody,
    SamplingBody,
    TokenizeRequest,
)
from infer.server.protocol.structured import CONSTRAINTS, read_structured
from infer.server.state import ServedModel, ServerState, current_record, engine_id, mark, salt_of
from infer.tokenizer.chat_template import Opening

DEFAULT_COMPLETION_TOKENS = 16  # other servers' default, too; a chat may fill the context

SAME_NAME = [  # fields with the same meaning in a body and in SamplingParams
    name
    for name in SamplingBody.model_fields
    if name in SamplingParams.__dataclass_fields__ and name not in ("max_tokens", "logit_bias")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One parsed body: a request for each of its prompts."""

    job_id: str
    created: int  # seconds since 1970
    model: ServedModel
    model_name: str  # the name that the client used
    requests: tuple[Request, ...]
    prompts: tuple[str | None, ...]  # texts, if the client sent texts
    time_limit_s: float | None
    is_chat: bool = False
    is_continued: bool = False  # the answer continues the last message
    form: AnswerFormat | None = None  # how to parse reasoning and tool calls

    @property
    def is_fresh(self) -> bool:
        """True if answers start a message of their own."""
        return self.is_chat and not self.is_continued

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of every prompt."""
        return self.requests[0].params

    @property
    def has_tools(self) -> bool:
        """True if an answer may have tool calls."""
        return self.form is not None and bool(self.form.tools)


async def open_completion(body: CompletionRequest, state: ServerState) -> Job:
    """Return the job of a completion body; raises a `RequestError` that names the wrong field."""
    mark("parse")
    model = await state.use_model(body.model)
    prompts = split_prompts(
        body.prompt, state.config.max_prompts, "prompt", "send fewer, or serve with a larger max_prompts"
    )
    check_queue(model, len(prompts))
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise RequestError.about("max_tokens", "is 0, which needs echo; set echo or max_tokens >= 1")
        max_tokens = 1  # the engine must sample a token to compute a prompt; the token is not returned
    params = await make_params(
        body,
        model,
        state,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    special = body.add_special_tokens is not False
    most = most_tokens(body, model.encoder, max_tokens)
    if body.suffix:
        ids = [await asyncio.to_thread(model.encoder.encode_gap, only_text(body, prompts), body.suffix)]
    else:
        ids = await encode_prompts(model.encoder, prompts, "prompt", add_special=special, most=most)
    if len(ids) > 1 and [] in ids:
        raise RequestError(f"prompt {ids.index([])} has no tokens; give at least one", param="prompt")
    is_whole = most is None and not body.suffix
    texts = tuple(prompt if isinstance(prompt, str) and is_whole else None for prompt in prompts)
    return make_job(body, model, state, ids, params, texts=texts)


async def open_chat(body: ChatRequest, state: ServerState) -> Job:
    """Return the job of a chat body; raises a `RequestError` that names the wrong field.

    Clients send limits on reasoning to any model. A model that does not reason meets every limit, so the
    field is ignored and reported as such.
    """
    mark("parse")
    model = await state.use_model(body.model)
    if model.encoder.think is None:
        _ignore_limits(body, model.encoder)
    logprobs = count_logprobs(body.logprobs, body.top_logprobs)
    params = await make_params(body, model, state, max_tokens=body.max_tokens, logprobs=logprobs)
    check_has_template(model.encoder)
    ids, bound, form = await asyncio.to_thread(
        model.encoder.open_chat,
        body.messages,
        params,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        max_reasoning_tokens=body.max_reasoning_tokens,
        template_options=body.chat_template_kwargs,
        opening=read_opening(body),
        most=most_tokens(body, model.encoder, body.max_tokens),
    )
    if params.structured is not None and form is not None and form.is_forced:
        body.note_ignored([params.structured.param.partition(".")[0]])  # the answer is calls
    return make_job(body, model, state, [ids], bound or params, form=form)


def fill_context(job: Job) -> Job:
    """Return the job without its `max_tokens` if that exceeds the rest of the context."""
    request, max_tokens = job.requests[0], job.params.max_tokens
    room = job.model.encoder.context_len - len(request.prompt)
    if max_tokens is None or not 0 < room < max_tokens:
        return job
    return replace(job, requests=(replace(request, params=replace(request.params, max_tokens=None)),))


def count_logprobs(has_logprobs: bool | None, num_top: int | None) -> int | None:
    """Return a completion's `logprobs` for the two fields of a chat."""
    if num_top is not None and not has_logprobs:
        raise RequestError.about("top_logprobs", "needs logprobs to be true")
    return (num_top or 0) if has_logprobs else None


def _ignore_limits(body: ChatRequest, encoder: PromptEncoder) -> None:
    """Remove limits on reasoning; invalid ones stay and are rejected later."""
    if body.reasoning_effort is not None and EFFORTS.get(body.reasoning_effort, 0) != 0:
        body.reasoning_effort = None
        body.note_ignored(["reasoning_effort"])
    if body.max_reasoning_tokens is not None and body.max_reasoning_tokens > 0:
        body.max_reasoning_tokens = None
        body.note_ignored(["max_reasoning_tokens"])
    options = body.chat_template_kwargs or {}
    if "enable_thinking" in options and not encoder.reads_option("enable_thinking"):
        body.chat_template_kwargs = {name: options[name] for name in options if name != "enable_thinking"}
        body.note_ignored(["chat_template_kwargs.enable_thinking"])


def make_job(
    body: SamplingBody,
    model: ServedModel,
    state: ServerState,
    ids: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    texts: tuple[str | None, ...] = (None,),
    form: AnswerFormat | None = None,
) -> Job:
    """Return the job of a body: a new id, and a numbered request for each prompt."""
    mark("tokenize")
    check_supported(body, params)
    if body.priority and model.config.scheduler.scheduler_policy != "priority":
        body.note_ignored(["priority"])
    is_chat = isinstance(body, ChatRequest)
    job_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    options = request_options(body, state) | {"priority": body.priority or 0}
    requests = tuple(
        Request(request_id=engine_id(f"{job_id}-{i}"), prompt=tuple(prompt), params=params, **options)
        for i, prompt in enumerate(ids)
    )
    return Job(
        job_id=job_id,
        created=int(time.time()),
        model=model,
        model_name=body.model if body.model is not None else model.name,
        requests=requests,
        prompts=texts,
        time_limit_s=time_limit(body, state),
        is_chat=is_chat,
        is_continued=isinstance(body, ChatRequest) and bool(body.continue_final_message),
        form=form,
    )


def request_options(body: SamplingBody | ReadingBody, state: ServerState) -> dict[str, Any]:
    """Return the options of an engine's request that are common to all bodies.

    The adapter is the one found with the model: its name may have been unloaded since then.
    """
    record = current_record()
    return {
        "deadline": None if body.timeout is None else time.monotonic() + body.timeout,
        "cache_salt": salt_of(body.cache_salt),
        "adapter": state.adapter_of(body.model) if record is None else record.adapter,
    }


def time_limit(body: SamplingBody | ReadingBody, state: ServerState) -> float | None:
    """Return the time limit of an answer in seconds, the client's or the server's; None: no limit."""
    return min((limit for limit in (body.timeout, state.config.request_timeout) if limit), default=None)


async def make_params(
    body: SamplingBody,
    model: ServedModel,
    state: ServerState,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Merge the client's fields with the model's defaults; routes name the keyword arguments differently."""
    fields: dict[str, Any] = dict(model.encoder.sampling_defaults)
    if body.use_beam_search:  # the model's defaults do not apply
        fields = {"temperature": 0.0}
    fields |= {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    for name in ("n", "best_of"):
        check_int(name, fields.get(name, 1), 1, state.config.max_n)
    if body.logit_bias is not None:
        fields["logit_bias"] = _read_bias(body.logit_bias)
    if any(getattr(body, name) is not None for name in CONSTRAINTS):  # a schema may take milliseconds
        fields["structured"] = await asyncio.to_thread(read_structured, body)
    if body.allowed_token_ids == []:
        raise RequestError.about("allowed_token_ids", "is empty, which would allow no token; leave it out")
    fields |= {"max_tokens": max_tokens, "logprobs": logprobs}
    if prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs
    params = SamplingParams(**fields)
    return await asyncio.to_thread(model.encoder.ban_words, params) if params.bad_words else params


def check_supported(body: SamplingBody, params: SamplingParams) -> None:
    """Reject combinations that are not supported."""
    if body.stream_options is not None and not body.stream:
        raise RequestError.about("stream_options", "needs stream to be true")
    if body.stream:
        check_streams(params, "leave stream out")
        if body.prompt_logprobs is not None:
            raise RequestError.about("prompt_logprobs", "are not available in a stream; leave stream out")


def split_prompts(given: Prompts, most: int, param: str, advice: str) -> list[str | list[int]]:
    """Return the prompts of a body as a list; the error for more than `most` has `advice`.

    A text is one prompt, and so is a list of token ids.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError.about(param, "is an empty list; give at least one prompt")
    if isinstance(given[0], int):
        return [given]
    if len(given) > most:
        raise RequestError.about(param, f"is a list of {len(given)}, at most {most} are allowed; {advice}")
    return list(given)


def check_queue(model: ServedModel, num_prompts: int) -> None:
    """Reject a body with more prompts than idle engines could accept: no retry could succeed."""
    if (max_queue := model.config.scheduler.max_queue) is None:
        return
    room = sum(client.stats().max_batch_size + max_queue for client in model.clients)
    if num_prompts > room:
        raise RequestError.about(
            "prompt",
            f"has {num_prompts} prompts, but only {room} may run or wait at a time (max_batch_size and "
            "max_queue); send fewer at a time",
        )


def most_tokens(
    body: SamplingBody | ReadingBody, encoder: PromptEncoder, num_output: int | None
) -> int | None:
    """Return the number of last tokens of a prompt that are kept; None: all.

    -1 keeps as many as fit before `num_output` tokens.
    """
    if (most := body.truncate_prompt_tokens) is None:
        return None
    if most != -1:
        if most < 1:
            raise RequestError.about(
                "truncate_prompt_tokens", f"must be a number of tokens from 1 on, or -1, got {most}"
            )
        return most
    num_output = 1 if num_output is None else num_output
    return encoder.context_len - (num_output if num_output < encoder.context_len else 1)


def read_opening(body: ChatRequest | TokenizeRequest) -> Opening:
    """Return the way in which the prompt of a conversation ends."""
    if not body.continue_final_message:
        return "none" if body.add_generation_prompt is False else "answer"
    if body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt contradict each other; give one of them",
            param="continue_final_message",
        )
    return "continued"


def only_text(body: CompletionRequest, prompts: Sequence[str | list[int]]) -> str:
    """Return the text before a gap; reject a suffix with several prompts, token ids or other options."""
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise RequestError.about("suffix", "goes with one prompt, which is a text")
    if body.echo or body.truncate_prompt_tokens is not None or body.add_special_tokens is False:
        raise RequestError.about("suffix", "goes without echo, truncate_prompt_tokens and add_special_tokens")
    return prompts[0]


async def encode_prompts(
    encoder: PromptEncoder,
    prompts: Sequence[str | list[int]],
    param: str,
    *,
    add_special: bool = True,
    most: int | None = None,
) -> list[list[int]]:
    """Return the last `most` ids of every prompt, tokenized in a thread."""
    if any(isinstance(prompt, str) for prompt in prompts):
        return await asyncio.to_thread(encoder.encode_all, prompts, param, add_special=add_special, most=most)
    return encoder.encode_all(prompts, param, most=most)


def check_has_template(encoder: PromptEncoder) -> None:
    """Reject a conversation with a model that has no chat template."""
    if not encoder.has_chat_template:
        raise RequestError(
            "this model has no chat template; use /v1/completions, or serve it with --chat-template",
            param="messages",
        )


def _read_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise RequestError.about(
                "logit_bias",
                'maps token ids to numbers from -100 to 100, as {"17": -1.5}, '
                f"got the key {key[:40]!r}; /tokenize gives the ids of a text",
            )
        bias[int(key)] = value
    return bias

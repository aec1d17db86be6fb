"""`POST /completion`, `GET /props`, `GET /slots`: routes for clients of llama.cpp's server.

    prompt, n_predict, samplers, grammar, json_schema  ──►  CompletionRequest, as /v1/completions

    data: {"content": " sky", "tokens": [9], "stop": false, ...}                            one per token
    data: {"content": "", "stop": true, "stop_type": "eos", "timings": {...}, ...}          the end

Without `n_predict`, a text continues until it ends or fills the context. `/completions` is the same route:
some clients add the s. A grammar is in GBNF, which the grammar compiler translates.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Request, Response

from infer import __version__
from infer.errors import MalformedRequest, RequestError, show_value
from infer.finish_reason import FinishReason
from infer.frontend.outputs import RequestOutput
from infer.sampling.params import MAX_INT, RowLogprobs, SamplingParams
from infer.server.protocol.body import Neutral
from infer.server.protocol.errors import ApiError
from infer.server.protocol.generation import Generation, Piece
from infer.server.protocol.logprobs import chat_logprobs
from infer.server.protocol.schemas import (
    RANDOM_SEED,
    TEXT_ONLY,
    AskingBody,
    CompletionRequest,
    Int,
    LlamaSampling,
    Name,
    PromptField,
)
from infer.server.protocol.stream import FrameWriter
from infer.server.protocol.translate import Job, fill_context, open_completion
from infer.server.routes.json_route import answer, json_response, make_router, server_state
from infer.server.state import ServedModel

router = make_router()

NO_LIMIT = (-2, -1)  # values of n_predict
NEVER_DRAWN = -100.0  # bias of a token that must not be sampled
CHAT_NAMES = {  # fields of a completion: their names in this body
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
}
_SAMPLERS = "samplers are penalties, temperature, top_k, top_p and min_p, in this order"
_NO_GAPS = "this server continues a text, it cannot fill a gap"


class LlamaCompletion(LlamaSampling, AskingBody):
    """`POST /completion`."""

    neutral = {
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "xtc_probability"), Neutral((0.0,), _SAMPLERS)),
        **dict.fromkeys(("min_keep", "mirostat", "n_indent"), Neutral((0,), _SAMPLERS)),
        **dict.fromkeys(("tfs_z", "typical_p"), Neutral((1.0,), _SAMPLERS)),
        "image_data": Neutral(([],), TEXT_ONLY),
        "input_extra": Neutral(([],), _NO_GAPS),
        **dict.fromkeys(("input_prefix", "input_suffix"), Neutral(("",), _NO_GAPS)),
        "lora": Neutral(([],), "an adapter is chosen by the name of the model"),
        "n_cmpl": Neutral((1,), "send several requests, or n to /v1/completions"),
        "post_sampling_probs": Neutral((False,), "logprobs are the model's own"),
        "response_fields": Neutral(([],), "all fields are sent"),
        "samplers": Neutral((), _SAMPLERS),
        "t_max_predict_ms": Neutral((0,), "limit n_predict"),
        "top_n_sigma": Neutral((-1, -1.0), _SAMPLERS),
    }
    # penalties see the whole text, not repeat_last_n tokens
    ignored = frozenset({
        "api_key", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
        "dynatemp_exponent", "id_slot", "mirostat_eta", "mirostat_tau", "n_cache_reuse", "n_discard",
        "n_keep", "penalize_nl", "repeat_last_n", "return_progress", "slot_id", "speculative.n_max",
        "speculative.n_min", "speculative.p_min", "sse_ping_interval", "timings_per_token",
        "xtc_threshold",
    })  # fmt: skip
    elsewhere = {
        "max_tokens": "this route takes n_predict",
        "messages": "conversations go to /v1/chat/completions, this route takes prompt",
    }
    renamed = CHAT_NAMES

    prompt: PromptField
    model: Name | None = None
    n_predict: Int | None = None
    ignore_eos: bool | None = None
    num_speculative_tokens: Int | None = None
    logit_bias: list[list[int | float | bool | str]] | dict[str, float] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    n_probs: Int | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None


async def open_llama(body: LlamaCompletion, http: Request) -> Job:
    """Return the job of a body, after converting it to a completion."""
    if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
        raise RequestError.about(
            "prompt", "is a list of prompts; send one per request, or several to /v1/completions"
        )
    own = ("prompt", "n_predict", "logit_bias", "cache_prompt", "return_tokens", "grammar")
    ours = {name: chat_name for chat_name, name in CHAT_NAMES.items()}
    fields = {
        ours.get(name, name): getattr(body, name) for name in LlamaCompletion.model_fields if name not in own
    }
    fields |= {
        "prompt": body.prompt,
        "max_tokens": MAX_INT if body.n_predict in (None, *NO_LIMIT) else body.n_predict,
        "logit_bias": None if body.logit_bias is None else _bias(body.logit_bias),
        "logprobs": body.n_probs or None,
        "guided_grammar": body.grammar or None,
        "cache_salt": uuid.uuid4().hex if body.cache_prompt is False else None,  # unique: no sharing
        "seed": None if body.seed == RANDOM_SEED else body.seed,
    }
    if fields["max_tokens"] == 0:
        raise RequestError.about("n_predict", "is 0; set it to -1 for no limit, or to at least 1")
    return fill_context(await open_completion(CompletionRequest.of(fields), server_state(http)))


def _bias(given: list[list[int | float | bool | str]] | dict[str, float]) -> dict[str, float]:
    """Return biases by token id, from an object or from pairs; false in a pair means never."""
    if isinstance(given, dict):
        return given
    bias: dict[str, float] = {}
    for i, pair in enumerate(given):
        token, value = pair if len(pair) == 2 else (None, None)
        is_id = isinstance(token, int) and not isinstance(token, bool)
        if not is_id or isinstance(value, str) or value is None or value is True:
            raise MalformedRequest.about(
                f"logit_bias[{i}]",
                f"must be a token id and a number or false, as [17, -1.5], got {show_value(pair)}; /tokenize "
                "gives the ids of a text",
            )
        bias[str(token)] = NEVER_DRAWN if value is False else float(value)
    return bias


class LlamaWriter(FrameWriter):
    """llama.cpp's format: a data frame per token, and at the end the settings, counts and timings."""

    def __init__(self, generation: Generation, body: LlamaCompletion) -> None:
        super().__init__(generation, body)
        self._body = body
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None

    def frames(self, piece: Piece) -> list[bytes]:
        """Return the frame of one token; none for a piece that adds nothing."""
        delta = piece.delta
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        if not delta.text and not delta.token_ids:
            return []
        said = {"index": 0, "content": delta.text, "tokens": delta.token_ids, "stop": False, "id_slot": -1}
        return [_frame({**said, **self._counts(), **self._probs(delta.token_ids, delta.logprobs)})]

    def end(self) -> list[bytes]:
        """Return the last frame."""
        return [_frame(self._ending("", ()))]

    @classmethod
    def failure(cls, told: ApiError) -> bytes:
        """Return the error as a frame."""
        return b"data: " + told.encode() + b"\n\n"

    def whole(self, answers: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        output = answers[0].outputs[0]
        self._finish_reason, self._stop_reason = output.finish_reason, output.stop_reason
        ids = output.token_ids if self._body.return_tokens else ()
        return {**self._ending(output.text, ids), **self._probs(output.token_ids, output.logprobs or ())}

    def _counts(self) -> dict[str, int]:
        usage = self.generation.usage()
        return {"tokens_predicted": usage["completion_tokens"], "tokens_evaluated": usage["prompt_tokens"]}

    def _probs(self, token_ids: Sequence[int], rows: Sequence[RowLogprobs]) -> dict[str, Any]:
        """Return the logprobs of some tokens, each with its alternatives, if requested."""
        if not self._body.n_probs:
            return {}
        found = chat_logprobs(self.generation.job.model.encoder.tokenizer, rows)["content"]
        for each, token_id, row in zip(found, token_ids, rows, strict=True):
            each["id"] = token_id
            for other, (other_id, _) in zip(each["top_logprobs"], row.top, strict=True):
                other["id"] = other_id
        return {"completion_probabilities": found}

    def _ending(self, content: str, token_ids: Sequence[int]) -> dict[str, Any]:
        job, word = self.generation.job, self._stop_reason
        is_limited, is_word = self._finish_reason == FinishReason.LENGTH, isinstance(word, str)
        return {
            "index": 0,
            "content": content,
            "tokens": list(token_ids),
            "id_slot": -1,
            "stop": True,
            "model": job.model_name,
            **self._counts(),
            "tokens_cached": self.generation.usage()["prompt_tokens_details"]["cached_tokens"],
            "generation_settings": settings_of(job.model, job.params, is_stream=bool(self._body.stream)),
            "prompt": job.prompts[0] or "",
            "truncated": False,  # prompts are never truncated
            "stop_type": "limit" if is_limited else "word" if is_word else "eos",
            "stopping_word": word if is_word else "",
            "timings": self._timings(),
        }

    def _timings(self) -> dict[str, float]:
        usage, (prompt_s, answer_s) = self.generation.usage(), self.generation.phases_s()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        timings: dict[str, float] = {"cache_n": num_cached}
        for name, count, seconds in (
            ("prompt", usage["prompt_tokens"] - num_cached, prompt_s),
            ("predicted", usage["completion_tokens"], answer_s),
        ):
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": 1000 * seconds,
                f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
                f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
            }
        details = usage.get("completion_tokens_details", {})
        if (num_kept := details.get("accepted_prediction_tokens")) is not None:
            num_drafts = num_kept + details["rejected_prediction_tokens"]
            timings |= {"draft_n": num_drafts, "draft_n_accepted": num_kept}
        return timings


def _frame(fields: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def settings_of(model: ServedModel, params: SamplingParams, *, is_stream: bool) -> dict[str, Any]:
    """Return sampling parameters with llama.cpp's names."""
    return {
        "n_ctx": model.encoder.context_len,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "n_probs": params.logprobs or 0,
        "ignore_eos": params.ignore_eos,
        "stream": is_stream,
    }


@router.post("/completion", response_model=None)
@router.post("/completions", response_model=None)
async def complete(body: LlamaCompletion, http: Request) -> Response:
    """Continue a prompt."""
    return await answer(http, body, open_llama(body, http), LlamaWriter)


@router.get("/props", response_model=None)
async def get_props(http: Request, model: str | None = None) -> Response:
    """Return a model's defaults and the number of sequences it runs at a time, but not the path of its files.

    This never loads a model: an unloaded on-demand model has no defaults and no slots.
    """
    state = server_state(http)
    served = state.look_at(model)
    name = served.name if served is not None else model or state.default_model
    props: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": 0, "params": {}},
        "total_slots": 0,
        "model_alias": name,
        "model_path": name,
        "chat_template": "",
        "bos_token": "",
        "eos_token": "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"infer {__version__}",
    }
    if served is None:
        return json_response(props)
    encoder = served.encoder
    tokenizer = encoder.tokenizer
    defaults: dict[str, Any] = {**encoder.sampling_defaults, "max_tokens": None}
    settings = settings_of(served, SamplingParams(**defaults), is_stream=False)
    return json_response(
        props
        | {
            "default_generation_settings": {"n_ctx": settings["n_ctx"], "params": settings},
            "total_slots": sum(client.stats().max_batch_size for client in served.clients),
            "chat_template": encoder.chat_template or "",
            "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "eos_token": tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else "",
        }
    )


@router.get("/slots", response_model=None)
async def get_slots(http: Request, model: str | None = None, fail_on_no_slot: int = 0) -> Response:
    """Return the slots for sequences in a model's engines, free or taken; an unloaded model has none."""
    served = server_state(http).look_at(model)
    if served is None:
        return Response(b"[]", media_type="application/json")
    taken: list[bool] = []
    for client in served.clients:
        stats = client.stats()
        taken += [i < stats.num_running for i in range(stats.max_batch_size)]
    if fail_on_no_slot and taken and all(taken):
        return ApiError(status=503, message="every slot is taken; try again later").response()
    n_ctx = served.encoder.context_len
    slots = [{"id": i, "n_ctx": n_ctx, "is_processing": is_taken} for i, is_taken in enumerate(taken)]
    return Response(orjson.dumps(slots), media_type="application/json")

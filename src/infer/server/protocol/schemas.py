"""The request bodies that clients may send, field by field.

body.py explains the four groups of fields; `neutral`, `ignored` and `elsewhere` of a class list the fields of
other servers. The keys of a chat message are treated in the same way, so that a client can send back an
answer of this or another server as its library stored it.

Only types are checked here; ranges are checked where values are used (`SamplingParams`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from infer.dialects.answer import TOOL_KEYS
from infer.errors import MalformedRequest, RequestError
from infer.sampling.params import MAX_INT
from infer.server.protocol.body import MAX_NAME_LEN, Body, Neutral, account_for, pass_over

MAX_CONSTRAINT_BYTES = 262_144  # largest size of a field with a schema or a grammar
TEXT_ONLY = "this server reads and writes text"  # reason to reject images, audio and files
RANDOM_SEED = -1  # any seed, for clients of llama.cpp and Ollama
_NO_TRANSFER = Neutral((), "this server has no such extension")

ABOUT_THE_CLIENT = frozenset({
    "cache_control", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip

SAMPLING_NEUTRAL: dict[str, Neutral] = {
    "early_stopping": Neutral((False,), "beam search runs until its result is certain"),
    "guided_decoding_backend": Neutral(
        ("auto", "guidance", "llguidance"), "constraints are compiled by llguidance"
    ),
    "kv_transfer_params": _NO_TRANSFER,
    "length_penalty": Neutral((1.0,), "beams are ranked by mean logprob"),
    "logits_processors": Neutral(([],), "a request cannot bring code"),
    "request_id": Neutral((), "send the header x-request-id"),
    "return_tokens_as_token_ids": Neutral((False,), "set return_token_ids"),
    "skip_special_tokens": Neutral((True,), "special tokens are never shown"),
    "spaces_between_special_tokens": Neutral((True, False), "special tokens are never shown"),
    "vllm_xargs": _NO_TRANSFER,
}

COMPLETION_NEUTRAL: dict[str, Neutral] = {"prompt_embeds": Neutral((), "prompts are text or token ids")}

CHAT_NEUTRAL: dict[str, Neutral] = {
    "add_special_tokens": Neutral((False,), "the chat template writes them"),
    "audio": Neutral((), TEXT_ONLY),
    "chat_template": Neutral((), "templates are never taken from requests"),
    "documents": Neutral(([],), "put documents into the messages"),
    "echo": Neutral((False,), "use /v1/completions"),
    "function_call": Neutral((), "it is deprecated, use tools and tool_choice"),
    "functions": Neutral((), "it is deprecated, use tools"),
    "mm_processor_kwargs": _NO_TRANSFER,
    "modalities": Neutral((["text"],), TEXT_ONLY),
    "moderation": Neutral((), "this server does not moderate"),
    "prediction": Neutral((), "this server does not use predicted outputs"),
    "web_search_options": Neutral((), "this server does not search"),
}


# The keys of a message that templates get; other keys that servers write mean nothing to a model.
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
MESSAGE_NEUTRAL: dict[str, Neutral] = {
    "audio": Neutral((), TEXT_ONLY),
    "function_call": Neutral((), "use tool_calls"),
}
PART_IGNORED = frozenset({"annotations", "cache_control"})  # ignored keys of a text part
# `parsed` is an object that the openai package makes from the content; `refusal` comes with a content
MESSAGE_IGNORED = frozenset({
    "annotations", "cache_control", "created_at", "id", "parsed", "provider_specific_fields",
    "reasoning_details", "refusal", "thinking_blocks", "timestamp",
})  # fmt: skip


def _integer(value: Any) -> Any:
    """Convert a float such as 4.0 to an integer: some clients have only floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Conversation(Body):
    """A body that may have messages."""

    is_answered: ClassVar[bool] = True  # a model answers it: every tool result follows its call

    @model_validator(mode="after")
    def _account_for_message_keys(self) -> Self:
        messages: list[dict[str, Any]] = getattr(self, "messages", None) or []
        ignored: dict[str, None] = {}  # keys, in order
        call_ids: set[Any] = set()
        for i, message in enumerate(messages):
            if message.get("content") is None and isinstance(message.get("refusal"), str):
                message["content"] = message.pop("refusal")  # the text in place of content
            if message.get("role") == "tool" and self.is_answered:
                check_call_id(message.get("tool_call_id"), call_ids, f"messages[{i}].tool_call_id")
            elif calls := message.get("tool_calls"):
                call_ids.update(_ids_of(calls))
            _, names = account_for(
                message, MESSAGE_KEYS, MESSAGE_NEUTRAL, MESSAGE_IGNORED, where=f"messages[{i}]."
            )
            # a null or an empty list has no effect
            ignored |= {f"messages.{name}": None for name in names if message[name]}
            if isinstance(parts := message.get("content"), list):
                if message.get("role") == "assistant":
                    message["content"] = parts = [_refusal_as_text(part) for part in parts]
                keys = (key for part in parts if isinstance(part, dict) for key in part)
                ignored |= {f"messages.content.{key}": None for key in keys if key in PART_IGNORED}
        self.note_ignored(ignored)
        return self


def _refusal_as_text(part: Any) -> Any:
    """Return a part of an answer as text, if it is a refusal that a client sends back."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return (
        {"type": "text", "text": part["refusal"]}
        if is_refusal and part.keys() == {"type", "refusal"}
        else part
    )


def check_call_id(call_id: Any, call_ids: Collection[Any], where: str) -> None:
    """Reject a tool result without an earlier tool call; a call without an id matches any result."""
    if isinstance(call_id, str) and call_id not in call_ids and None not in call_ids:
        raise MalformedRequest.about(
            where,
            f"is {call_id[:80]!r}, which is not the id of a tool call before it; "
            "send the assistant's message with that call, or leave its result out",
        )


def _ids_of(calls: Any) -> set[Any]:
    """Return the ids of tool calls; None for a call without one. Non-lists are rejected elsewhere."""
    given = (
        [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [None]
    )
    return {each if isinstance(each, str) else None for each in given}


TokenIds = list[int]
Prompts = str | list[str] | TokenIds | list[TokenIds]


def _check_prompts(value: Any) -> Any:
    """Check for a text, a list of ids, or a list of either; by hand, since a list may have a million ids."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds <= {int} or kinds == {str}:
            return value
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return value
    raise PydanticCustomError(
        "prompt_type", "must be a string, a list of strings, a list of token ids or a list of such lists"
    )


def _check_stop(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return value
    raise PydanticCustomError("stop_type", "must be a string or a list of strings")


StopField = Annotated[str | list[str], PlainValidator(_check_stop, json_schema_input_type=str | list[str])]
PromptField = Annotated[Prompts, PlainValidator(_check_prompts, json_schema_input_type=Prompts)]
Name = Annotated[str, Field(max_length=MAX_NAME_LEN)]
Int = Annotated[int, BeforeValidator(_integer)]


class AskingBody(Body):
    """A body that requests text, streamed or not."""

    stream: bool | None = None

    @property
    def wants_metrics(self) -> bool:
        """True if the answer should tell its own times."""
        return False


class MeasuredBody(AskingBody):
    """A body whose answer can tell its own times."""

    metrics: bool | None = None
    include_metrics: bool | None = None  # vLLM's name for the same

    @property
    def wants_metrics(self) -> bool:
        """True if the answer should tell its own times."""
        return bool(self.metrics or self.include_metrics)


class StreamOptions(Body):
    """Options for what a stream has in addition to its tokens."""

    where = "stream_options."
    neutral = {"include_obfuscation": Neutral((False,), "frames are not padded")}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TunedBody(MeasuredBody):
    """The fields that have the same names on all routes that generate text."""

    model: Name | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int | None = None
    min_tokens: Int | None = None
    stop: StopField | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    num_speculative_tokens: Int | None = None  # most drafts per step; 0: none
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    cache_salt: Name | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class LlamaSampling(Body):
    """The sampling parameters that llama.cpp's server and Ollama have in common."""

    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: StopField | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class SamplingBody(TunedBody):
    """The fields that completions and chat share."""

    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None  # the newer name for the same
    truncate_prompt_tokens: Int | None = None  # keep this many last tokens; -1: as many as fit
    prompt_logprobs: Int | None = None
    return_token_ids: bool | None = None
    n: Int | None = None
    best_of: Int | None = None
    use_beam_search: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None  # SGLang's names
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def spellings(self) -> Mapping[str, str]:
        """Parameters, by the names that the client used."""
        names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
        return {name: sent for name, sent in names.items() if getattr(self, sent, None) is not None}

    @model_validator(mode="after")
    def _join_max_tokens(self) -> Self:
        """Merge the two names into `max_tokens`."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"max_tokens is {old} and max_completion_tokens is {new}; "
                "they mean the same, give one of them",
                param="max_completion_tokens",
            )
        self.max_tokens = new if old is None else old
        return self


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`."""

    neutral = SAMPLING_NEUTRAL | COMPLETION_NEUTRAL
    ignored = ABOUT_THE_CLIENT
    elsewhere = {
        "messages": "conversations go to /v1/chat/completions, this route takes prompt",
        "input": "this route takes prompt",
    }

    prompt: PromptField
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Int | None = None
    add_special_tokens: bool | None = None


class ChatRequest(SamplingBody, Conversation):
    """`POST /v1/chat/completions`."""

    neutral = SAMPLING_NEUTRAL | CHAT_NEUTRAL
    ignored = ABOUT_THE_CLIENT | {"verbosity"}
    elsewhere = {
        "prompt": "plain prompts go to /v1/completions, this route takes messages",
        "input": "this route takes messages",
    }

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    max_reasoning_tokens: Int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _read_hints(self) -> Self:
        """Remove hints without effect, and unknown keys of tools."""
        if self.top_logprobs == 0 and not self.logprobs:
            self.top_logprobs = None
            self.note_ignored(["top_logprobs"])
        if self.tools is not None:
            self.tools = [_known_keys(tool, f"tools[{i}].") for i, tool in enumerate(self.tools)]
        return self


def _known_keys(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool without unknown keys that may be ignored; other errors are found later."""
    if any(key not in ("type", "function") for key in tool):
        known = ("type", "function", *TOOL_KEYS)  # keys of the inner object are rejected, with that hint
        tool = {key: tool[key] for key in tool if key in known or not pass_over(key, where, known)}
    function = tool.get("function")
    if isinstance(function, dict) and any(key not in TOOL_KEYS for key in function):
        place = f"{where}function."
        kept = {
            key: function[key] for key in function if key in TOOL_KEYS or not pass_over(key, place, TOOL_KEYS)
        }
        tool = {**tool, "function": kept}
    return tool


class CountedChat(ChatRequest):
    """A chat whose prompt is only counted: its history may begin anywhere."""

    is_answered = False


class TokenizeRequest(Conversation):
    """`POST /tokenize`: a text, or a conversation."""

    is_answered = False
    elsewhere = {"content": "this route takes prompt"}
    neutral = {"chat_template": CHAT_NEUTRAL["chat_template"]}

    model: Name | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    elsewhere = {"prompt": "this route takes tokens"}

    model: Name | None = None
    tokens: TokenIds


class ReadingBody(Body):
    """A body whose texts are only read, not answered."""

    neutral = {"request_id": SAMPLING_NEUTRAL["request_id"]}
    ignored = ABOUT_THE_CLIENT

    model: Name | None = None
    truncate_prompt_tokens: Int | None = None
    cache_salt: Name | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class EmbeddingRequest(ReadingBody):
    """`POST /v1/embeddings`."""

    elsewhere = {"prompt": "this route takes input"}

    input: PromptField
    encoding_format: str | None = None
    dimensions: Int | None = None  # the first numbers of each vector; None: all
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] | None = None  # the side that is cut off


class ScoredText(Body):
    """A document in an object, as Jina's and Cohere's clients send it."""

    where = "documents."

    text: str


Text = str | ScoredText
MAX_DOCUMENTS = 2048
Documents = Annotated[list[Text], Field(min_length=1, max_length=MAX_DOCUMENTS)]


class ScoringBody(ReadingBody):
    """The fields that rerank and score share."""

    instruction: str | None = None  # task description, for rerankers whose prompt has one
    use_activation: bool | None = None  # False: the logit of the score
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None


class RerankRequest(ScoringBody):
    """`POST /v1/rerank`, as in Jina's, Cohere's and vLLM's APIs."""

    query: Text
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None  # 0: all, as in vLLM
    return_documents: bool | None = None


class ScoreRequest(ScoringBody):
    """`POST /v1/score`, as in vLLM's API: each side has two names."""

    text_1: Text | Documents | None = None
    text_2: Text | Documents | None = None
    queries: Text | Documents | None = None
    documents: Text | Documents | None = None

"""The text side of a model: its tokenizer, its chat template, and the requests made with them.

    text, ids or messages ──► PromptEncoder ──► Request

The engine takes only token ids. The steps before it (text to ids, messages to a prompt) are here, shared by
`LLM`, `AsyncLLM` and the server; embeddings.py makes the requests for embeddings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypedDict, Unpack, cast

from infer.config.settings import LoadConfig
from infer.dialects.answer import EFFORTS, AnswerFormat, find_format, read_choice, read_tools
from infer.dialects.table import check_parsers, find_dialect, find_think
from infer.errors import ConfigError, ContextOverflow, RequestError, closest
from infer.frontend.functions import Tools, as_choice, as_schemas
from infer.frontend.inputs import Conversation, Prompt, is_token_id, read_prompt
from infer.loader.pooling import Scorer
from infer.loader.text_headers import TextHeaders
from infer.sampling.params import SamplingParams, check_int
from infer.scheduling.request import Request
from infer.tokenizer.chat_template import CHECKPOINT, ChatTemplate, Opening, find_template
from infer.tokenizer.fim import find_gap_marks
from infer.tokenizer.tokenizer import Tokenizer


class RequestOptions(TypedDict, total=False):
    """The options of a request besides its prompt and its params; `Request` has the defaults."""

    request_id: str  # default: the next number
    priority: int  # smaller is more urgent; read by the `priority` policy
    deadline: float | None  # `time.monotonic()` by which it should end; read by the `deadline` policy
    cache_salt: str  # only requests with the same salt share cached prefixes
    adapter: str  # the name of a LoRA adapter to answer with; "": none


class ChatOptions(RequestOptions, total=False):
    """The options of a conversation: a request's options, and options for the contents of the answer."""

    tools: Tools | None  # tools in the form of OpenAI's API, or Python functions (functions.py)
    tool_choice: object  # 'auto', 'none', 'required', or the name of a tool
    max_reasoning_tokens: int | None  # None: any number
    template_options: Mapping[str, Any] | None  # values for the chat template besides messages and tools


def split_options(options: RequestOptions | ChatOptions) -> tuple[dict[str, Any], RequestOptions]:
    """The options that `PromptEncoder.open_chat` takes, and the request's own."""
    request = {name: value for name, value in options.items() if name not in CHAT_OPTIONS}
    chat = {name: value for name, value in options.items() if name in CHAT_OPTIONS}
    if "tool_choice" in chat:
        chat["tool_choice"] = as_choice(chat["tool_choice"])
    return chat, cast("RequestOptions", request)


PEER_OPTIONS = {  # names in the calls of other libraries, and the names here
    "sampling_params": "params",
    "use_tqdm": "show_progress",
    "lora_request": "adapter",
    "lora_path": "adapter",
    "chat_template_kwargs": "template_options",
}
LEVELS = {"none": "low", "minimal": "low", "xhigh": "high"}  # names that templates have for an effort
CHAT_OPTIONS = ChatOptions.__annotations__.keys() - RequestOptions.__annotations__.keys()


class PromptEncoder:
    """Turns text and messages into requests for one model. Safe to share between threads."""

    def __init__(
        self,
        config: LoadConfig,
        headers: TextHeaders,
        tokenizer: Tokenizer,
        *,
        family: str,
        context_len: int,
        model_len: int,
    ) -> None:
        """Take the engine's facts about the model: its family, the served context and the model's own."""
        self.name = headers.source.name
        self.family = family
        self.revision = headers.source.revision  # version of the model, if known
        self.context_len = context_len
        self.model_len = model_len
        self.sampling_defaults = headers.defaults.sampling  # values of fields left out; may be empty
        self.pooling = headers.pooling  # the way to make embeddings
        self._source = headers.source
        self.tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        try:
            self._template = find_template(family, tokenizer, config.chat_template)
        except ConfigError as error:
            if config.chat_template is not None:
                raise
            self._no_template = error  # raised for a conversation
        check_parsers(config.tool_call_parser, config.reasoning_parser)
        self.dialect = self.think = None  # notations of tool calls and reasoning, if known
        if self._template is not None:
            self.dialect = find_dialect(config.tool_call_parser, self._template, tokenizer)
            self._template.write_calls = None if self.dialect is None else self.dialect.write_calls
            self.think = find_think(config.reasoning_parser, self._template, tokenizer)
        # A base model often has the tokens of its family's chat format, but no template.
        self.ships_chat_template = (
            config.chat_template is not None or self.tokenizer.published_chat_template is not None
        )
        self._numbers = itertools.count()

    @cached_property
    def scorer(self) -> Scorer:
        """The model's method of scoring texts, read from its files at the first use."""
        from infer.loader.score_head import read_scorer

        return read_scorer(
            self._source, self.pooling, self.tokenizer.published_chat_template, self.tokenizer.token_id
        )

    @property
    def has_chat_template(self) -> bool:
        """True if conversations can be turned into prompts."""
        return self._template is not None

    @property
    def template_in_use(self) -> str:
        """The chat template that conversations are written with, for the log; "": there is none."""
        if self._template is None:
            return ""
        is_own = self._template.name == CHECKPOINT
        return f'"{CHECKPOINT}, as shipped with the model"' if is_own else self._template.name

    def reads_option(self, name: str) -> bool:
        """Return True if the chat template reads a keyword of `template_options`."""
        return self._template is not None and name in self._template.kwargs

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template; None: there is none."""
        return None if self._template is None else self._template.source

    @property
    def template_warning(self) -> str | None:
        """The warning for a chat with a model that may not know the format; None if there is none."""
        if self.ships_chat_template or self._template is None:
            return None
        return (
            f"{self.name} came without a chat template, as base models do; conversations are written with "
            f"the {self._template.name!r} template of its family, which it may never have seen in training; "
            "set another with --chat-template FILE, or confirm this one with --chat-template family"
        )

    def encode(
        self, text: str, *, add_special: bool = True, most: int | None = None, keeps_end: bool = True
    ) -> list[int]:
        """A plain prompt's ids, with BOS if the model uses it; the text of special tokens stays text.

        With `most`, a longer text is cut to BOS and its last ids, or without `keeps_end` to its first ids.
        """
        if not isinstance(text, str):
            raise RequestError(
                f"a prompt must be text or token ids, got {type(text).__name__}", param="prompt"
            )
        limit = self.context_len if most is None else None
        try:
            ids = self.tokenizer.encode(text, add_special=add_special, context_len=limit)
            return self._cut(ids, most, keeps_end=keeps_end)
        except ContextOverflow as error:
            raise error.of(self.model_len) from None

    def _cut(self, ids: list[int], most: int | None, *, keeps_end: bool = True) -> list[int]:
        """At most `most` ids: the first ids, or the ids that begin every prompt and the last ids."""
        if most is None or len(ids) <= most:
            return ids
        if not keeps_end:
            return ids[:most]
        begin = self.tokenizer.begin([])
        num_kept = len(begin) if ids[: len(begin)] == begin and len(begin) < most else 0
        return ids[:num_kept] + ids[len(ids) - most + num_kept :]

    def encode_gap(self, before: str, behind: str) -> list[int]:
        """The ids of a text with a gap for the model to fill; only some vocabularies have marks for a gap."""
        if (marks := find_gap_marks(self.tokenizer)) is None:
            raise RequestError.about(
                "suffix", "needs a model whose vocabulary marks gaps (fill in the middle); this one cannot"
            )
        texts = (self.encode(text, add_special=False) for text in (before, behind))
        return self.tokenizer.begin(marks.join(*texts))

    def encode_all(
        self,
        prompts: Sequence[str | list[int]],
        param: str,
        *,
        add_special: bool = True,
        most: int | None = None,
        keeps_end: bool = True,
    ) -> list[list[int]]:
        """The ids of every prompt; texts are tokenized, and given ids must be in the vocabulary.

        `param` is the caller's name for the prompts. At most `most` ids of a prompt are kept, as in `encode`.
        """
        last = self.tokenizer.vocab_size - 1
        places = [param] if len(prompts) == 1 else [f"{param} {i}" for i in range(len(prompts))]
        for prompt, place in zip(prompts, places, strict=True):
            if not isinstance(prompt, str) and prompt and not 0 <= min(prompt) <= max(prompt) <= last:
                raise RequestError(
                    f"{place} holds ids from {min(prompt)} to {max(prompt)}, "
                    f"but this model's tokens are 0 to {last}",
                    param=param,
                )
        ids: list[list[int]] = []
        try:
            for prompt in prompts:
                if isinstance(prompt, str):
                    ids.append(self.encode(prompt, add_special=add_special, most=most, keeps_end=keeps_end))
                else:
                    ids.append(self._cut(prompt, most, keeps_end=keeps_end))
        except RequestError as error:
            raise error.of_prompt(places[len(ids)], param) from None
        return ids

    def encode_chat(
        self,
        messages: Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        opening: Opening = "answer",
        most: int | None = None,
    ) -> list[int]:
        """The last `most` ids of a conversation, ready for the assistant's answer, or as `opening` says."""
        if self._template is None:
            raise self._no_template
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        options = template_options or {}
        self._template.check_options(options)
        limit = self.context_len if most is None else None
        try:
            ids = self._template.encode_chat(messages, limit, opening=opening, tools=tools, **options)
            return self._cut(ids, most)
        except ContextOverflow as error:
            raise error.of(self.model_len).of_prompt("prompt", "messages") from None

    def open_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        *,
        tools: Tools | None = None,
        tool_choice: object = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        max_reasoning_tokens: int | None = None,
        template_options: Mapping[str, Any] | None = None,
        opening: Opening = "answer",
        most: int | None = None,
    ) -> tuple[list[int], SamplingParams | None, AnswerFormat | None]:
        """A conversation's ids, the parameters of its answer, and its format: None if it is only text.

        With `tool_choice` none the tools are not shown to the model. An answer that continues the last
        message does not begin with reasoning.
        """
        tools = as_schemas(tools)
        known = read_tools(tools)
        choice, allowed = read_choice(tool_choice, known)
        if choice == "none":
            tools, known = None, ()
        if known and self.has_chat_template and self.dialect is None:
            raise RequestError(
                "this model's chat template does not show how tools are called, so calls could not be found "
                "in its answers; serve it with --tool-call-parser NAME, or leave tools out",
                param="tools",
            )
        budget = self._read_budget(reasoning_effort, max_reasoning_tokens)
        options = dict(template_options or {})
        if reasoning_effort is not None and self.reads_option("reasoning_effort"):
            options.setdefault("reasoning_effort", LEVELS.get(reasoning_effort, reasoning_effort))
            budget = budget if reasoning_effort == "none" else max_reasoning_tokens
        for name in filter(self.reads_option, ("enable_thinking", "thinking")):
            if budget == 0:
                options[name], budget = False, None
            elif reasoning_effort is not None or max_reasoning_tokens is not None:
                options.setdefault(name, True)  # some models reason only if asked
        ids = self.encode_chat(messages, tools=tools, template_options=options, opening=opening, most=most)
        form = find_format(
            self.tokenizer,
            ids,
            dialect=self.dialect,
            think=self.think,
            is_continued=opening == "continued",
            tools=known,
            choice=choice,
            allowed=allowed,
            is_parallel=parallel_tool_calls,
        )
        if form is not None and isinstance(params, SamplingParams | None):
            given = self.default_params(len(ids)) if params is None else params
            bound = form.bind(given, self.tokenizer, budget)
            params = params if bound is given else bound
            if bound.reasoning is not None:
                begun, form = form.opened(self.tokenizer)
                ids += begun
        return ids, params, form

    def _read_budget(self, effort: str | None, max_tokens: int | None) -> int | None:
        """The number of reasoning tokens that are allowed; None: any number."""
        if effort is not None and effort not in EFFORTS:
            raise RequestError.about(
                "reasoning_effort", f"must be one of {', '.join(EFFORTS)}, got {effort!r:.80}"
            )
        if effort is None and max_tokens is None:
            return None
        if max_tokens is not None:
            check_int("max_reasoning_tokens", max_tokens, 0)
        budget = EFFORTS[effort] if max_tokens is None and effort is not None else max_tokens
        if self.think is None and budget != 0:
            named = (
                ("reasoning_effort", effort) if max_tokens is None else ("max_reasoning_tokens", max_tokens)
            )
            why = "this model does not reason: its chat template has no tags for it"
            raise RequestError.about(named[0], f"is {named[1]!r}, but {why}; leave it out")
        if max_tokens is None and budget and self.think and self.tokenizer.token_id(self.think.end) is None:
            return None  # the engine can only force an end of one token; an effort is not binding
        return budget

    def make_request(
        self, prompt: Prompt, params: SamplingParams | None, **options: Unpack[RequestOptions]
    ) -> Request:
        """A request for text or token ids; without an id it gets the next number.

        Without params the model's defaults apply, and a short context ends the output without an error.
        """
        given = read_prompt(prompt)
        ids = self.encode(given) if isinstance(given, str) else given
        _check_options(options)
        if params is None:
            params = self.default_params(len(ids))
        if not isinstance(params, SamplingParams):
            raise RequestError.about("params", f"must be SamplingParams, got {type(params).__name__}")
        if options.get("request_id") is None:
            options["request_id"] = self.next_id()
        return Request(prompt=tuple(ids), params=self.ban_words(params), **options)

    def ban_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the ids of `bad_words`, both at the start of a text and after a space."""
        if not params.bad_words:
            return params
        spellings = [text for word in params.bad_words for text in (word, f" {word.lstrip()}")]
        ids = [tuple(self.tokenizer.encode(text, add_special=False)) for text in spellings]
        banned = dict.fromkeys((*params.banned_ids, *filter(None, ids)))
        return replace(params, banned_ids=tuple(banned), bad_words=())

    def default_params(self, num_prompt: int) -> SamplingParams:
        """The model's defaults; a short context ends the output without an error."""
        advice: dict[str, Any] = dict(self.sampling_defaults)
        params = SamplingParams(**advice)
        if params.max_tokens is not None and num_prompt + params.max_tokens > self.context_len:
            params = SamplingParams(**(advice | {"max_tokens": None}))
        return params

    def next_id(self) -> str:
        """The next number, as the id of a request that was given none."""
        return f"request-{next(self._numbers)}"


def _check_options(options: RequestOptions) -> None:
    """Refuse unknown options and options of the wrong type."""
    for name in options:
        if name in SamplingParams.__dataclass_fields__:
            raise RequestError.about(name, f"belongs to the params: SamplingParams({name}=...)")
        if name not in RequestOptions.__annotations__:
            if name in CHAT_OPTIONS:
                raise RequestError.about(name, "is an option of a chat: use chat or stream_chat")
            hint = closest(name, list(ChatOptions.__annotations__), aliases=PEER_OPTIONS, listed="allowed")
            raise RequestError(f"unknown option {name!r}{hint}", param=name)
    priority, deadline = options.get("priority", 0), options.get("deadline")
    if not is_token_id(priority):
        raise RequestError.about("priority", f"must be an integer, got {priority!r}")
    if deadline is not None and (isinstance(deadline, bool) or not isinstance(deadline, int | float)):
        raise RequestError.about("deadline", f"must be a number of seconds, got {deadline!r}")
    for name in ("cache_salt", "adapter"):
        if not isinstance(given := options.get(name, ""), str):
            raise RequestError.about(name, f"must be text, got {given!r}")

"""A model that answers at once: the command line's tests need its manners, not its mind.

A token is a character, the context is `context_len` of them, and the answer repeats the last message
or prompt in capitals, one character at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.dialects.events import AnswerEvent
from infer.errors import ContextOverflow, EngineError, QueueFull, TemplateError
from infer.sampling.params import SamplingParams


@dataclass(frozen=True)
class FakeDelta:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | None = None
    events: tuple[AnswerEvent, ...] = ()


class FakeStream(Iterator[FakeDelta]):
    """Stands in for infer.frontend.llm.TextStream."""

    def __init__(self, deltas: Generator[FakeDelta, None, None], num_prompt_tokens: int) -> None:
        self._deltas = deltas
        self.num_prompt_tokens = num_prompt_tokens

    def __next__(self) -> FakeDelta:
        return next(self._deltas)

    def close(self) -> None:
        self._deltas.close()


class FakeLLM:
    """Stands in for infer.frontend.llm.LLM and remembers how it was called."""

    name = "fake"
    sampling_defaults: Mapping[str, float] = {}

    def __init__(
        self,
        *,
        context_len: int = 1000,
        has_chat_template: bool = True,
        ships_chat_template: bool = True,
        max_open: int = 1000,
        **knobs: Any,
    ) -> None:
        self.encoder = self  # its own text side
        self.ships_chat_template = has_chat_template and ships_chat_template
        warns = has_chat_template and not ships_chat_template
        self.template_warning = "fake came without a chat template" if warns else None
        self.context_len = context_len
        self.max_open = max_open  # requests the engine takes before it says that its queue is full
        self.has_chat_template = has_chat_template
        self.knobs = knobs
        self.params: list[SamplingParams] = []
        self.chats: list[list[dict[str, str]]] = []
        self.options: list[Mapping[str, object] | None] = []
        self.num_opened = self.num_closed = 0
        self.is_closed = False
        self.before_token: Callable[[int], None] = lambda index: None

    def close(self) -> None:
        self.is_closed = True

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: object = None,
        template_options: Mapping[str, object] | None = None,
    ) -> list[int]:
        for message in messages:
            if "forbidden" in message["content"]:
                raise TemplateError("the template refuses this message")
        self.chats.append([dict(message) for message in messages])
        self.options.append(template_options)
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def stream(self, prompt: str | list[int], params: SamplingParams) -> FakeStream:
        """Open at once, as the real one does; a prompt that holds "broken" fails after its first letter."""
        prompt = self.encode(prompt) if isinstance(prompt, str) else prompt
        room = self.context_len - len(prompt)
        if (params.max_tokens or 1) > room:
            raise ContextOverflow(len(prompt), params.max_tokens or 1, self.context_len)
        if self.num_opened - self.num_closed >= self.max_open:
            raise QueueFull("the queue is full")
        self.params.append(params)
        self.num_opened += 1
        return FakeStream(self._deltas(prompt, params, room), len(prompt))

    def _deltas(
        self, prompt: list[int], params: SamplingParams, room: int
    ) -> Generator[FakeDelta, None, None]:
        answer = "".join(map(chr, prompt)).rpartition(">")[2].upper()
        limit = params.max_tokens or room
        try:
            for index, letter in enumerate(answer[:limit]):
                self.before_token(index)
                if index == 1 and "BROKEN" in answer:
                    raise EngineError("the step failed")
                yield FakeDelta(letter, (ord(letter),), None)
            yield FakeDelta("", (), "stop" if len(answer) <= limit else "length")
        finally:
            self.num_closed += 1

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        tools: object = None,
        tool_choice: object = None,
        max_reasoning_tokens: int | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> Iterator[FakeDelta]:
        return self.stream(self.encode_chat(messages, template_options=template_options), params)

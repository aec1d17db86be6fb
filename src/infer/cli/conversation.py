"""A conversation: its messages, the model that answers the next, and the parameters of the answers.

The model sees the whole conversation at each turn. When it no longer fits the context, the oldest turns are
dropped, with a notice for each.

Settings are kept as flags: a change is written into `args`, and `fit` makes the sampling parameters from
`args` again. So a setting also holds for the next model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from infer.cli import asking, flags
from infer.cli.answer import Screen, ShownAnswer, notice, show_answer
from infer.cli.chat_tools import ToolBox, escape
from infer.cli.remote import RemoteModel
from infer.dialects.events import ToolCall, read_arguments
from infer.errors import ConfigError, ContextOverflow, shorten

if TYPE_CHECKING:
    from infer.frontend.llm import LLM
    from infer.frontend.prompts import ChatOptions
    from infer.sampling.params import SamplingParams


@dataclasses.dataclass(slots=True, eq=False)
class ChatSession:
    """The messages so far, and the model that answers the next."""

    args: argparse.Namespace
    llm: LLM | RemoteModel
    params: SamplingParams
    system: str | None
    options: ChatOptions
    toolbox: ToolBox | None = None
    tool_choice: str | dict[str, Any] | None = None  # choice for the first answer to a message
    turns: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # all but the system message
    num_answers: int = 0  # answers so far, forgotten ones included: the number makes the next seed
    attached: str = ""  # text of files, for the end of the next message

    def fit(self) -> None:
        """Make the sampling parameters from the flags, for the current model; a drawn seed stays."""
        made = flags.fit_to_model(
            asking.params_from(self.args), self.args, self.llm.context_len, self.llm.sampling_defaults
        )
        given = flags.sampling_given(self.args)
        self.params = made if "seed" in given else dataclasses.replace(made, seed=self.params.seed)
        if isinstance(self.llm, RemoteModel):
            self.llm.sampling = {"seed", *given}

    def forget(self) -> None:
        """Forget all messages but the system message."""
        self.turns.clear()
        self.attached = ""

    def take_back(self) -> list[dict[str, Any]]:
        """Remove and return the user's last message and what follows it; an empty list if there is none."""
        places = [place for place, turn in enumerate(self.turns) if turn["role"] == "user"]
        taken = self.turns[places[-1] :] if places else []
        del self.turns[len(self.turns) - len(taken) :]
        return taken

    def messages(self) -> list[dict[str, Any]]:
        """The conversation in the form that the chat template takes."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def say(self, text: str, screen: Screen, is_stopped: Callable[[], bool]) -> ShownAnswer:
        """Add the user's message and the model's answer; a message that cannot be answered is taken back."""
        self.turns.append({"role": "user", "content": asking.join_text(text, self.attached)})
        try:
            answer = self.go_on(screen, is_stopped, self.tool_choice)
        except BaseException:
            self.turns.pop()
            raise
        self.attached = ""
        return answer

    def go_on(
        self, screen: Screen, is_stopped: Callable[[], bool], tool_choice: str | dict[str, Any] | None = None
    ) -> ShownAnswer:
        """Add the model's answer to the messages so far."""
        answer = self._answer(screen, is_stopped, tool_choice)
        calls = () if self.toolbox is None else tuple(_whole_calls(answer))
        answer = dataclasses.replace(answer, calls=calls)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = [call.to_wire() for call in calls]
        self.turns.append(message)
        self.num_answers += 1
        return answer

    def call_tools(self, answer: ShownAnswer, *, is_last: bool) -> bool:
        """Add the results of an answer's calls, and return True if the model goes on from them."""
        if self.toolbox is None or not answer.calls:
            return False
        results, goes_on = self.toolbox.call_all(answer.calls, goes_on=not is_last)
        self.turns += results
        return goes_on

    def _answer(
        self, screen: Screen, is_stopped: Callable[[], bool], tool_choice: str | dict[str, Any] | None
    ) -> ShownAnswer:
        params = flags.nth_draw(self.params, self.num_answers)
        options: ChatOptions = {**self.options, "tool_choice": tool_choice}
        if self.toolbox is not None:
            options["tools"] = self.toolbox.schemas
        while True:
            try:
                deltas = self.llm.stream_chat(self.messages(), params, **options)
                return show_answer(deltas, screen, is_stopped)
            except ContextOverflow:  # raised before the first piece of text
                later = [index for index, turn in enumerate(self.turns) if turn["role"] == "user"][1:]
                if not later:
                    raise
                forgotten = self.turns[0]
                del self.turns[: later[0]]
                notice(
                    f"[the context of {self.llm.context_len} tokens is full: "
                    f"forgot your oldest message and its answer: {shorten(forgotten['content'], 40)!r}]"
                )


def _whole_calls(answer: ShownAnswer) -> Iterator[ToolCall]:
    """Yield the complete calls of an answer; none if the user stopped it."""
    for call in answer.calls:
        given = read_arguments(call.arguments.strip() or "{}")
        if given is not None and answer.finish_reason is not None:
            yield dataclasses.replace(call, arguments=json.dumps(given, ensure_ascii=False))
        else:
            notice(f"[skipped a call of {escape(call.name)}: its arguments are incomplete]")


def check_template(llm: LLM | RemoteModel) -> None:
    """Refuse a model that cannot hold a conversation; warn where its template is a guess."""
    if not llm.has_chat_template:
        raise ConfigError(
            f"{llm.name} has no chat template, so it cannot hold a conversation; "
            "use 'infer generate --raw', or give a template with --chat-template FILE"
        )
    if not isinstance(llm, RemoteModel) and llm.encoder.template_warning is not None:
        notice(f"infer: warning: {llm.encoder.template_warning}")

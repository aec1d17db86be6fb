"""A model that plays a part: a real tokenizer and chat template, and an answer chosen by the prompt's text.

    with serve_actor("qwen3", directory, lambda prompt: "<think>hm</think>Hello.") as url: ...

What a client receives is exact, and everything between the client and the engine is real.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from infer.config.settings import LoadConfig
from infer.errors import ContextOverflow
from infer.frontend.open_model import find_source, make_encoder
from infer.frontend.prompts import PromptEncoder
from infer.loader.headers import read_headers
from infer.sampling.params import RowLogprobs
from infer.scheduling.request import Request, StepOutput
from scripts.make_checkpoint import make_checkpoint
from tests.support.app import Site
from tests.support.live_server import serve
from tests.support.wire import ScriptedClient, outputs_of

Play = Callable[[str], str]  # the rendered prompt, special tokens included, to the answer


def reasoned(prompt: str, thought: str, answer: str) -> str:
    """An answer behind a thought, which the prompt may have opened."""
    opening = "" if prompt.endswith("<think>\n") else "<think>\n"
    return f"{opening}{thought}\n</think>\n\n{answer}"


class Actor(ScriptedClient):
    """An engine that says what `play` makes of each prompt, up to the request's max_tokens."""

    def __init__(self, encoder: PromptEncoder, play: Play) -> None:
        super().__init__(self._act)
        self._encoder, self._tokenizer = encoder, encoder.tokenizer
        self.play = play
        self.prompts: list[str] = []

    async def _act(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        self.prompts.append(self._tokenizer.decode(request.prompt, skip_special=False))
        text = self.play(self.prompts[-1])
        ids = self._tokenizer.encode(text, add_special=False, parse_special=True)
        limit = request.params.max_tokens
        if len(request.prompt) + (limit or 1) > self._encoder.context_len:
            raise ContextOverflow(len(request.prompt), limit or 1, self._encoder.context_len)
        is_cut = limit is not None and len(ids) > limit
        for output in outputs_of(request, ids[:limit], "length" if is_cut else "stop"):
            yield _with_logprobs(output, request.params.logprobs)


def _with_logprobs(output: StepOutput, num_top: int | None) -> StepOutput:
    """The output with logprobs, if they were asked for: every token is as likely as the next."""
    if num_top is None:
        return output
    (token_id,) = output.token_ids
    top = tuple((token_id + i, -0.5) for i in range(num_top))
    return msgspec.structs.replace(output, logprobs=(RowLogprobs(token_id, -0.5, 1, top),))


def read_encoder(family: str, directory: Path) -> PromptEncoder:
    """The text side of a tiny checkpoint, with room for tools and long conversations."""
    make_checkpoint(family, directory)
    config = LoadConfig(model=str(directory))
    encoder = make_encoder(config, read_headers(find_source(config, show_progress=False)))
    encoder.context_len = encoder.model_len = 8192  # an actor answers whatever fits
    return encoder


@contextmanager
def serve_actor(actor: Actor, encoder: PromptEncoder, **knobs: Any) -> Iterator[str]:
    """Serve an actor under the name "fake" on the loopback interface; yields the URL."""
    with serve(Site(actor, encoder=encoder, access_log=False, **knobs).app) as url:
        yield url

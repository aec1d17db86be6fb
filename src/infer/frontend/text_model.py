"""A model with its text side: the common part of `LLM` and `AsyncLLM`.

knobs ──► files, encoder, weights ──► engine ──► taken over by the subclass
prompt or messages ──► Request, and an OutputBuilder for its answer
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from typing import Any, NoReturn, TypeAlias, Unpack

from infer.config.settings import EngineConfig, knob_table
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.errors import ConfigError, EngineError
from infer.frontend.inputs import Conversation, Prompt
from infer.frontend.open_model import open_model
from infer.frontend.outputs import OutputBuilder
from infer.frontend.prompts import ChatOptions, RequestOptions, split_options
from infer.sampling.params import SamplingParams

Opener: TypeAlias = Callable[..., OutputBuilder]  # makes a request, and the builder of its answer


class TextModel:
    """The common part of `LLM` and `AsyncLLM`: a model with its text side; keywords are knobs."""

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        show_progress: bool = False,
        observer: EngineObserver | None = None,
        **knobs: Any,
    ) -> None:
        for name in knobs:
            if name in SamplingParams.__dataclass_fields__ and name not in knob_table():
                raise ConfigError(f"{name} belongs to the params: SamplingParams({name}=...)")
        self.config = EngineConfig.from_knobs(model=model, **knobs)
        self._process = os.getpid()  # the only process in which the engine has its threads and its GPU
        self.encoder, loaded = open_model(self.config, show_progress=show_progress)
        engine = build_engine(self.config, loaded, observer=observer)
        self.model_config = loaded.whole or loaded.config
        self.context_len = self.encoder.context_len = engine.context_len  # the longest prompt + output
        self.name, self.tokenizer = self.encoder.name, self.encoder.tokenizer
        self.sampling_defaults = self.encoder.sampling_defaults  # values of fields left out; may be empty
        self.adapter = ""  # LoRA adapter of requests that name none; "": the plain model
        self.has_chat_template = self.encoder.has_chat_template  # True if `chat` works with this model
        self._start(engine)

    def _start(self, engine: Engine) -> None:
        """Take over the engine."""
        raise NotImplementedError

    def __getstate__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled or copied; make one in each process")

    @property
    def _is_inherited(self) -> bool:
        """True if this process was forked from the one that made the engine."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self._is_inherited:
            raise EngineError(
                f"this {type(self).__name__} was made before process {os.getpid()} was forked, and its "
                f"engine works only in process {self._process}; make one in the child, or start it with "
                'multiprocessing.get_context("spawn")'
            )

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Return these parameters, with the model's defaults for missing parameters and None."""
        chosen = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**(dict(self.sampling_defaults) | chosen))

    def _open_prompt(
        self, prompt: Prompt, params: SamplingParams | None, **options: Unpack[RequestOptions]
    ) -> OutputBuilder:
        options.setdefault("adapter", self.adapter)
        request = self.encoder.make_request(prompt, params, **options)
        return OutputBuilder(request, self.tokenizer, prompt if isinstance(prompt, str) else None)

    def _open_chat(
        self, messages: Conversation, params: SamplingParams | None, **options: Unpack[ChatOptions]
    ) -> OutputBuilder:
        chat, own = split_options(options)
        ids, params, form = self.encoder.open_chat(messages, params, **chat)
        own.setdefault("adapter", self.adapter)
        request = self.encoder.make_request(ids, params, **own)
        return OutputBuilder(request, self.tokenizer, None, is_chat=True, form=form)

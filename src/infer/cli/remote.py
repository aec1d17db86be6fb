"""A model that a server runs, for commands that need only its answers.

`RemoteModel` takes the place of an `LLM` and asks an OpenAI-compatible server, with nothing but the standard
library: one POST per answer, whose response is a stream of events

    data: {"choices": [{"delta": {"content": "The"}, "finish_reason": null}]}      a chat's
    data: {"choices": [{"text": "The", "finish_reason": null}]}                    a completion's
    data: [DONE]

A chat's delta may also hold `reasoning_content` (or `reasoning`) and pieces of `tool_calls`.

A thread reads each answer ahead. For the lines of a file, a server that is full (429 or 503) is asked again
after growing pauses, none shorter than its `Retry-After`: for up to ten minutes if it sends that header, else
four times. At a terminal the user sees the error at once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import urllib.error
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from queue import SimpleQueue
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Unpack

from infer.cli import flags
from infer.cli.connect import Unreachable, base_of, open_url
from infer.constraints.description import Structured
from infer.dialects.events import AnswerEvent, CallDelta, CallStart, ReasoningDelta, TextDelta
from infer.errors import ConfigError, ContextOverflow, EngineError, InferError, QueueFull, RequestError
from infer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from infer.frontend.prompts import ChatOptions

TIMEOUT_S = 600.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # pauses before a full server is asked again; the last one is repeated
MAX_PAUSE_S = 60.0  # longest pause, even if a server asks for more
PATIENCE_S = 600.0  # total of the pauses
FULL = (429, 503)
UNKNOWN_ID = -1  # a server sends text; each chunk counts as one token


class RemoteFull(QueueFull):
    """The server has no room for a request, and may have said when to ask again."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RemoteModel:
    """One model of an OpenAI-compatible server."""

    has_chat_template = True  # assumed: the server refuses a chat if it has none
    sampling_defaults: Mapping[str, float] = {}  # the server applies its own to fields that are not sent

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        sampling: Collection[str] = (),
        counts: bool = False,
        is_patient: bool = False,
    ) -> None:
        """Ask a server for its models; only `max_tokens` and the parameters named in `sampling` are sent.

        `counts` also asks it for token counts, which not every server has. With `is_patient` a full server is
        asked again.
        """
        self.sampling = sampling  # may change between answers
        self._counts = counts
        self.is_patient = is_patient
        self._base = base_of(url)
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):  # the key is not shown: logs keep messages
                raise ConfigError("--api-key must be printable ASCII characters, without a line break")
            self._headers["authorization"] = f"Bearer {api_key}"
        served = self._list_models()
        if not served:
            raise ConfigError(f"{url} serves no model at the moment")
        if model is not None and model not in served:
            raise ConfigError(f"{url} serves {', '.join(served)}, not {model!r}")
        self.served = list(served)
        self.name = model if model is not None else next(iter(served))
        self.context_len = served[self.name]

    def _list_models(self) -> dict[str, int]:
        """Return the context of each model by its name."""
        is_it = "is this an OpenAI-compatible server?"
        with self.open("/models", says=f"{self._base}/v1/models answered {{status}}; {is_it}") as answer:
            try:
                cards = json.load(answer)["data"]
                return {str(card["id"]): int(card.get("max_model_len") or 2**31) for card in cards}
            except (OSError, http.client.HTTPException) as error:
                said = f"the answer of {self._base}/v1/models broke off: {error}; try again"
                raise ConfigError(said) from None
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                raise ConfigError(f"{self._base}/v1/models does not list models; {is_it}") from None

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **options: Unpack[ChatOptions]
    ) -> RemoteStream:
        """Answer a conversation, piece by piece; closing the iterator hangs up, which ends the request."""
        body = {"messages": list(messages), **self._body(params)}
        for name, value in options.items():
            if value not in (None, {}, []):
                body["chat_template_kwargs" if name == "template_options" else name] = value
        return RemoteStream(self, "/chat/completions", body)

    def stream(self, prompt: str, params: SamplingParams) -> RemoteStream:
        """Continue a text, piece by piece."""
        return RemoteStream(self, "/completions", {"prompt": prompt, **self._body(params)})

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.name, "stream": True}
        body |= {name: getattr(params, name) for name in self.sampling}
        body["max_tokens"] = params.max_tokens  # always: a server's default for completions is 16
        if "logit_bias" in body:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if params.structured is not None:
            body |= to_fields(params.structured)
        if self._counts:
            body["stream_options"] = {"include_usage": True}
        return body

    def open(
        self, path: str, body: Mapping[str, Any] | None = None, *, says: str = "the server answered {status}"
    ) -> http.client.HTTPResponse:
        """Send a request and wait for the head of its answer; a refusal is raised.

        The error has the server's words, or `says` if its body is not in OpenAI's form.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            return open_url(self._base, f"/v1{path}", data=data, headers=self._headers, timeout_s=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:  # the error is also the response
                raise _refusal(error, says.replace("{status}", str(error.code))) from None
        except Unreachable as error:
            kind = ConfigError if body is None else EngineError  # EngineError: it answered a moment ago
            raise kind(str(error)) from None


class RemoteStream(Iterator[TextDelta]):
    """One answer, which a thread reads ahead as it comes."""

    def __init__(self, model: RemoteModel, path: str, body: Mapping[str, Any]) -> None:
        self.usage: dict[str, Any] | None = None  # the server's counts, once it sends them
        self.seconds = (0.0, 0.0)  # times from the request to its first piece of text, and to its latest
        self._pieces: SimpleQueue[TextDelta | InferError | None] = SimpleQueue()
        self._is_closed = False
        threading.Thread(target=self._run, args=(self._read(model, path, body),), daemon=True).start()

    def __next__(self) -> TextDelta:
        piece = self._pieces.get()
        if piece is None:
            self._pieces.put(None)  # a finished stream stays finished
            raise StopIteration
        if isinstance(piece, InferError):
            raise piece
        return piece

    def close(self) -> None:
        """Hang up with the next line that comes, which ends the request."""
        self._is_closed = True

    def _run(self, answer: Generator[TextDelta, None, None]) -> None:
        started = perf_counter()
        try:
            with closing(answer) as pieces:
                for piece in pieces:
                    now = perf_counter() - started
                    self.seconds = (self.seconds[0] or (now if piece.token_ids else 0.0), now)
                    self._pieces.put(piece)
        except InferError as error:
            self._pieces.put(error)
        except Exception as error:  # a thread's own errors go unseen
            said = f"the server's answer broke off: {type(error).__name__}: {error}"
            self._pieces.put(EngineError(said))
        finally:
            self._pieces.put(None)  # the end: otherwise the reader would wait for ever

    def _read(
        self, model: RemoteModel, path: str, body: Mapping[str, Any]
    ) -> Generator[TextDelta, None, None]:
        is_whole = False
        with _open_patiently(model, path, body) as answer:
            try:
                for line in answer:
                    if self._is_closed:
                        return
                    if not line.startswith(b"data:"):
                        continue
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        return
                    event = json.loads(payload)
                    if "error" in event:
                        said = event["error"].get("message", event["error"])
                        raise EngineError(f"the server gave up: {said}")
                    self.usage = event.get("usage") or self.usage
                    for piece in map(_to_delta, event["choices"]):
                        is_whole = is_whole or piece.finish_reason is not None
                        if piece.text or piece.events or piece.finish_reason is not None:
                            yield piece
            except (KeyError, TypeError, AttributeError) as error:
                what = f"has no {error}" if isinstance(error, KeyError) else "is not in OpenAI's form"
                raise EngineError(f"the server's answer broke off: its event {what}") from None
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                raise EngineError(f"the server's answer broke off: {error}") from None
        if not is_whole:
            raise EngineError("the server's answer broke off: the connection ended before it")


def _open_patiently(model: RemoteModel, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
    """Open an answer; a full server is asked again if the model is patient."""
    num_refused, waited_s = 0, 0.0
    while True:
        try:
            return model.open(path, body)
        except RemoteFull as error:
            is_over = error.retry_after_s is None and num_refused >= len(PAUSES_S)
            if not model.is_patient or is_over or waited_s >= PATIENCE_S:
                raise
            growing_s = PAUSES_S[min(num_refused, len(PAUSES_S) - 1)]
            pause_s = min(max(growing_s, error.retry_after_s or 0.0), MAX_PAUSE_S)
        sleep(pause_s)
        num_refused, waited_s = num_refused + 1, waited_s + pause_s


def to_fields(structured: Structured) -> dict[str, Any]:
    """A constraint in the fields that most servers know: OpenAI's for a schema, else vLLM's."""
    if structured.kind == "json_schema":
        described = {"name": "answer", "schema": json.loads(structured.text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": described}}
    if structured.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    value = structured.choices if structured.kind == "choice" else structured.text
    return {"structured_outputs": {structured.kind: value}}


def _to_delta(choice: Mapping[str, Any]) -> TextDelta:
    text = (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
    if not isinstance(text, str):
        raise TypeError(f"text is {text!r}")
    events = tuple(_read_events(choice.get("delta", {})))
    token_ids = (UNKNOWN_ID,) if text or events else ()
    reasons = {"finish_reason": choice["finish_reason"], "stop_reason": choice.get("stop_reason")}
    return TextDelta(text=text, token_ids=token_ids, events=events, **reasons)


def _read_events(delta: Mapping[str, Any]) -> Iterator[AnswerEvent]:
    """Yield the reasoning and the calls of a delta; not every server numbers its calls."""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if reasoning:
        yield ReasoningDelta(str(reasoning))
    for place, call in enumerate(delta.get("tool_calls") or ()):
        index = place if call.get("index") is None else int(call["index"])
        function = call.get("function") or {}
        if function.get("name"):
            yield CallStart(index, str(call.get("id") or f"call_{index}"), str(function["name"]))
        if function.get("arguments"):
            yield CallDelta(index, str(function["arguments"]))


def is_remote(args: argparse.Namespace) -> bool:
    """Return True if the user names a server to ask."""
    if args.url is None and args.api_key is not None:
        raise ConfigError("--api-key is for the server that --url names; give both or neither")
    return args.url is not None


def open_server(args: argparse.Namespace, **options: bool) -> RemoteModel:
    """The model of the server that `--url` names; the knobs of an engine are refused.

    The user's settings are sent, and always `max_tokens` and a seed (`flags.nth_draw`).
    Options are the same as for `RemoteModel`.
    """
    knobs = flags.knobs_from(args)
    model = knobs.pop("model", None)
    if knobs:
        names = ", ".join(flags.flag(name) for name in knobs)
        raise ConfigError(f"--url leaves the engine to the server, so {names} cannot be set here")
    sampling = {"seed", *flags.sampling_given(args)}
    return RemoteModel(args.url, model=model, api_key=args.api_key, sampling=sampling, **options)


def _refusal(answer: urllib.error.HTTPError, says: str) -> InferError:
    """Return the server's refusal as the error that a model loaded here would raise."""
    status = answer.code
    try:
        error = json.loads(answer.read(1 << 16))["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (OSError, http.client.HTTPException) as lost:
        return _failure(answer, f"{says} (its reason broke off: {lost})")
    except (ValueError, KeyError, TypeError, RecursionError):
        return _failure(answer, says)
    if status in (400, 422) and "no chat template" in message:  # its advice is a route; here it is a flag
        return RequestError(
            "the server's model has no chat template; use 'infer generate --raw', "
            "or serve it with --chat-template FILE",
            param=param,
        )
    if status in (400, 422) or code == "model_not_found":
        # not every server sends the code
        is_overflow = code == "context_length_exceeded" or "context length" in message
        return (ContextOverflow.in_words if is_overflow else RequestError)(message, param=param)
    if status == 401:
        said = f"the server asks for a key, or does not accept the one that was given: {message}"
        return ConfigError(f"{said}; give it with --api-key")
    return _failure(answer, f"the server answered {status}: {message}")


def _failure(answer: urllib.error.HTTPError, said: str) -> EngineError:
    if answer.code in FULL:
        return RemoteFull(said, retry_after_s=_seconds(answer.headers.get("retry-after")))
    return EngineError(said)


def _seconds(retry_after: str | None) -> float | None:
    """Return the header in seconds; None if it is a date or not a time at all."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if seconds >= 0 else None  # None also for nan

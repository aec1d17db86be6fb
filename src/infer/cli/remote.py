"""A model that a server runs, for those commands that need only its answers.

`RemoteModel` stands where an `LLM` stands in a conversation and asks an OpenAI-compatible server
instead, with nothing but the standard library: one POST per answer, its body a stream of events

    data: {"choices": [{"delta": {"content": "The"}, "finish_reason": null}]}
    data: [DONE]
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.errors import ConfigError, ContextOverflow, EngineError, InferError, RequestError
from infer.sampling.params import SamplingParams

TIMEOUT_S = 600.0
UNKNOWN_ID = -1  # a server sends text; each of its chunks is one token


@dataclass(frozen=True, slots=True)
class RemoteDelta:
    """A piece of an answer, as `TextDelta` is of a local one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None


class RemoteOverflow(ContextOverflow):
    """The server says that a prompt is too long; a conversation then forgets its oldest turn."""

    def __init__(self, message: str, *, param: str | None) -> None:
        RequestError.__init__(self, message, param=param)


class RemoteModel:
    """One model of an OpenAI-compatible server."""

    has_chat_template = True
    sampling_defaults: Mapping[str, float] = {}  # the server applies its own to what is not sent

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        sampling: Collection[str] = (),
    ) -> None:
        """Ask a server what it serves; of an answer's parameters only those named in `sampling` are sent."""
        self._sampling = sampling
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        if not self._base.startswith(("http://", "https://")):
            raise ConfigError(f"--url must start with http:// or https://, got {url!r}")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        with self._open("/models") as answer:
            served = {str(card["id"]): card for card in json.load(answer)["data"]}
        if model is not None and model not in served:
            raise ConfigError(f"{url} serves {', '.join(served)}, not {model!r}")
        self.name = model if model is not None else next(iter(served))
        self.context_len = int(served[self.name].get("max_model_len") or 2**31)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        template_options: Mapping[str, object] | None = None,
    ) -> Iterator[RemoteDelta]:
        """Answer a conversation, piece by piece; closing the iterator hangs up, which ends the request."""
        body: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        body |= {name: getattr(params, name) for name in self._sampling}
        body["max_tokens"] = params.max_tokens
        if "logit_bias" in body:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if template_options:
            body["chat_template_kwargs"] = dict(template_options)
        with self._open("/chat/completions", body) as answer:
            yield from _deltas(answer)

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data=data, headers=self._headers)
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise _refusal(error.code, error.read(1 << 16)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"cannot reach {self._base}: {reason}; is the server running?") from None
        return answer


def _deltas(answer: http.client.HTTPResponse) -> Iterator[RemoteDelta]:
    try:
        for line in answer:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            event = json.loads(payload)
            if "error" in event:
                raise EngineError(f"the server gave up: {event['error'].get('message', event['error'])}")
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text or choice["finish_reason"] is not None:
                    yield RemoteDelta(
                        text,
                        (UNKNOWN_ID,) if text else (),
                        choice["finish_reason"],
                        choice.get("stop_reason"),
                    )
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise EngineError(f"the server's answer broke off: {error}") from None


def _refusal(status: int, body: bytes) -> InferError:
    """The server's own words, as the error they would be without a server between."""
    try:
        error = json.loads(body)["error"]
        message, param, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError):
        return EngineError(f"the server answered {status}")
    if status in (400, 422):
        # not every server sends the code
        is_overflow = code == "context_length_exceeded" or "context length" in message
        return (RemoteOverflow if is_overflow else RequestError)(message, param=param)
    if status == 401:
        return ConfigError(f"the server asks for a key: {message}; give it with --api-key")
    return EngineError(f"the server answered {status}: {message}")

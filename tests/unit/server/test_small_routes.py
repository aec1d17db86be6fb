"""The routes around generation: models, tokens, embeddings."""

from __future__ import annotations

import base64
import math
import struct
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
import pytest

from infer.errors import RequestError
from infer.finish_reason import FinishReason
from infer.frontend.embeddings import to_unit
from infer.frontend.llm import LLM
from infer.loader.pooling import Pooling
from infer.scheduling.request import Request, StepOutput
from infer.server.routes import embeddings
from tests.support.wire import ScriptedClient, Wire, invalid, make_state


def test_models_are_listed_with_the_length_of_their_context(wire: Wire, oracle: LLM) -> None:
    wire.state.aliases["nick"] = {"tiny": 1.0}
    cards = wire.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "nick"]
    assert all(card["max_model_len"] == oracle.context_len for card in cards["data"])
    assert [card["parent"] for card in cards["data"]] == [None, "tiny"]
    assert {(card["dtype"], card["weights"]) for card in cards["data"]} == {("float32", "fp32")}
    assert {(card["kv_cache_dtype"], card["products"]) for card in cards["data"]} == {("float32", None)}
    assert wire.get("/v1/models/nick").json() == cards["data"][1]
    assert wire.get("/v1/models/org/other").status_code == 404
    assert wire.ok("/v1/completions", {"model": "nick", "prompt": "x", "max_tokens": 1})["model"] == "nick"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/v1/models/absent"])
def test_head_answers_as_get_does(wire: Wire, path: str) -> None:
    head, get = wire.request("HEAD", path), wire.get(path)
    assert head.status_code == get.status_code
    assert head.headers["content-length"] == get.headers["content-length"]
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/completions/stream", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_every_route_says_in_the_same_words_that_a_model_is_not_served(
    wire: Wire, path: str, body: dict[str, object]
) -> None:
    error = wire.refused(
        path, body | {"model": "tinny"}, 404 if invalid(path) == 400 else 422, "model_not_found"
    )
    assert error["param"] == "model"
    assert error["message"] == "model 'tinny' is not served here; did you mean 'tiny'?"
    missing = wire.get("/v1/models/tinny")
    assert missing.status_code == 404
    assert missing.json()["error"] == error | {"type": "NotFoundError"}


def test_a_server_without_models_says_so(wire: Wire) -> None:
    wire.state.models, wire.state.default_model = {}, None
    error = wire.refused("/v1/completions", {"prompt": "x"}, 422, "model_not_found")
    assert error["message"] == "no model is served at the moment; try again later"


def test_tokenize_says_what_would_run(wire: Wire, oracle: LLM) -> None:
    answer = wire.ok("/tokenize", {"model": "tiny", "prompt": "the river", "return_token_strs": True})
    assert answer["tokens"] == oracle.encode("the river")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == oracle.context_len
    assert "".join(answer["token_strs"][1:]) == "the river"
    bare = wire.ok("/tokenize", {"prompt": "the river", "add_special_tokens": False})
    assert bare["tokens"] == answer["tokens"][1:]
    assert bare["token_strs"] is None
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "add_generation_prompt": True}
    assert wire.ok("/tokenize", body)["tokens"] == oracle.encode_chat(messages)


def test_tokenize_takes_a_text_or_a_conversation(wire: Wire) -> None:
    wire.refused("/tokenize", {}, 400)
    wire.refused("/tokenize", {"prompt": "x", "messages": []}, 400)


def test_tokenize_names_the_fields_that_have_no_effect(wire: Wire) -> None:
    text = {"prompt": "x", "tools": [], "add_generation_prompt": False, "add_special_tokens": False}
    answer = wire.post("/tokenize", text)
    assert answer.headers["x-infer-ignored"] == "add_generation_prompt, tools"
    talk = {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": True, "tools": []}
    assert wire.post("/tokenize", talk).headers["x-infer-ignored"] == "add_special_tokens"


def test_detokenize_spells_special_tokens_out(wire: Wire, oracle: LLM) -> None:
    ids = oracle.encode("the river")
    assert wire.ok("/detokenize", {"tokens": ids})["prompt"] == "<|begin_of_text|>the river"
    assert wire.refused("/detokenize", {"tokens": [10**6]}, 400)["param"] == "tokens"
    wire.refused("/detokenize", {"tokens": ["a"]}, 400)


def test_tokenizer_info_names_the_tokens_at_both_ends(wire: Wire) -> None:
    info = wire.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|begin_of_text|>", "<|eot_id|>")


def unit(vector: list[float]) -> list[float]:
    return [value / math.hypot(*vector) for value in vector]


@pytest.mark.parametrize("pooling", [None, "last", "mean"])
def test_embeddings_are_the_engines_in_either_encoding(wire: Wire, oracle: LLM, pooling: str | None) -> None:
    texts = ["the river", "a clock"]
    numbers = wire.ok("/v1/embeddings", {"input": texts, "pooling": pooling})
    packed = wire.ok("/v1/embeddings", {"input": texts, "pooling": pooling, "encoding_format": "base64"})
    for i, text in enumerate(texts):
        (wanted,) = oracle.embed(text, pooling=pooling or "last", normalize=True)
        assert numbers["data"][i]["index"] == i
        assert numbers["data"][i]["embedding"] == pytest.approx(wanted, abs=1e-5)
        raw = base64.b64decode(packed["data"][i]["embedding"])
        assert struct.unpack(f"<{len(wanted)}f", raw) == pytest.approx(wanted, abs=1e-5)
        assert math.hypot(*wanted) == pytest.approx(1.0)
    assert numbers["id"].startswith("embd-") and numbers["id"] != packed["id"]  # Mistral's client needs one
    num_tokens = sum(len(oracle.encode(text)) for text in texts)
    assert numbers["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_embeddings_of_ids_are_those_of_their_text(wire: Wire, oracle: LLM) -> None:
    ids = oracle.encode("the river")
    by_text = wire.ok("/v1/embeddings", {"input": "the river"})["data"]
    assert wire.ok("/v1/embeddings", {"input": ids})["data"] == by_text
    assert wire.ok("/v1/embeddings", {"input": [ids]})["data"] == by_text


@pytest.mark.parametrize(
    "fields", [{}, {"pooling": "mean"}, {"normalize": False}, {"pooling": "last", "normalize": True}]
)
def test_the_library_and_the_route_give_the_same_numbers(wire: Wire, oracle: LLM, fields: Any) -> None:
    inputs: list[Any] = ["the river", "a clock", [7, 8, 9]]
    by_library = [oracle.embed(each, **fields) for each in inputs]
    for each, vectors in zip(inputs, by_library, strict=True):
        by_route = wire.ok("/v1/embeddings", {"input": each} | fields)["data"]
        assert vectors[0] == pytest.approx(by_route[0]["embedding"], abs=1e-5)
    for together, (alone,) in zip(oracle.embed(inputs, **fields), by_library, strict=True):
        assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ([10**6], {}),
        ([[5], []], {}),
        ([[5], list(range(5, 305))], {}),
        ("x" * 10**6, {}),
        ("x", {"pooling": "max"}),
    ],
)
def test_the_library_and_the_route_refuse_in_the_same_words(
    wire: Wire, oracle: LLM, given: Any, fields: Any
) -> None:
    error = wire.post("/v1/embeddings", {"input": given} | fields).json()["error"]
    with pytest.raises(RequestError) as caught:
        oracle.embed(given, **fields)
    assert (str(caught.value), caught.value.param) == (error["message"], error["param"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"input": []}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [[5], []]}, "input"),
    ],
)
def test_embeddings_refuse_what_they_cannot_do(wire: Wire, fields: dict[str, object], param: str) -> None:
    error = wire.refused("/v1/embeddings", {"input": "x"} | fields, 400)
    assert error["param"] == param
    assert "prompt " not in error["message"] and "max_tokens" not in error["message"]


def test_an_input_longer_than_the_context_is_told_so(wire: Wire) -> None:
    body = {"input": [[5], list(range(5, 305))]}
    error = wire.refused("/v1/embeddings", body, 400, "context_length_exceeded")
    assert error["param"] == "input"
    assert error["message"] == (
        "input 1 has 300 tokens, but this model's maximum context length is 256 tokens; shorten it"
    )


def test_a_model_called_by_no_name_is_the_default(wire: Wire) -> None:
    assert wire.ok("/v1/completions", {"prompt": "x", "max_tokens": 1})["model"] == "tiny"


def test_embeddings_use_the_engine_the_router_picks(oracle: LLM) -> None:
    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        embedding = (float(len(request.prompt)), 0.5)
        yield StepOutput(request.request_id, 0, (), finish_reason=FinishReason.STOP, embedding=embedding)

    wire = Wire(make_state(oracle.encoder, ScriptedClient(script)))
    assert wire.ok("/v1/embeddings", {"input": [7, 8, 9]})["data"][0]["embedding"] == unit([3.0, 0.5])


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_numbers_are_written_beside_the_event_loop_as_they_come(
    oracle: LLM, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    done: list[tuple[str, int]] = []  # what was done, and by which thread
    states = [(1 / (i + 1), 0.1, float(i)) for i in range(40)]

    async def script(request: Request) -> AsyncGenerator[StepOutput, None]:
        done.append(("embed", threading.get_ident()))
        yield StepOutput(
            request.request_id, 0, (), finish_reason=FinishReason.STOP, embedding=states[request.prompt[0]]
        )

    def noted(name: str) -> Callable[..., Any]:
        work = getattr(embeddings, name)

        def note(*args: object) -> object:
            done.append((name, threading.get_ident()))
            return work(*args)

        return note

    for name in ("encode_vector", "join_list"):
        monkeypatch.setattr(embeddings, name, noted(name))
    wire = Wire(make_state(oracle.encoder, ScriptedClient(script)))
    body = {"input": [[i] for i in range(40)], "encoding_format": encoding}
    answer = wire.post("/v1/embeddings", body)
    units = [unit(list(state)) for state in states]
    packed = [base64.b64encode(struct.pack("<3f", *vector)).decode() for vector in units]
    vectors: list[Any] = units if encoding == "float" else packed
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 40, "total_tokens": 40}
    about = {name: answer.json()[name] for name in ("id", "created")}
    wanted = {"object": "list", "data": data, **about, "model": "tiny", "usage": usage}
    assert answer.content == orjson.dumps(wanted), "to the last bit"

    in_loop = {thread for name, thread in done if name == "embed"}
    assert not [name for name, thread in done if name != "embed" and thread in in_loop]
    names = [name for name, _ in done]
    assert (names.count("encode_vector"), names[-1]) == (40, "join_list")
    for i in range(len(names)):  # the first are written before the last have come
        waiting = names[:i].count("embed") - names[:i].count("encode_vector")
        assert waiting <= embeddings.MAX_TOGETHER


@pytest.mark.parametrize(
    ("model", "asked", "is_unit"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_a_vector_has_the_length_1_unless_the_model_or_the_client_says_otherwise(
    wire: Wire,
    oracle: LLM,
    monkeypatch: pytest.MonkeyPatch,
    model: bool,
    asked: bool | None,
    is_unit: bool,
) -> None:
    monkeypatch.setattr(oracle.encoder, "pooling", Pooling(mode="mean", normalize=model))
    (found,) = wire.ok("/v1/embeddings", {"input": [7, 8, 9], "normalize": asked})["data"]
    (raw,) = oracle.embed([7, 8, 9], pooling="mean", normalize=False)  # the model's own mode
    assert found["embedding"] == pytest.approx(unit(raw) if is_unit else raw, abs=1e-5)


def test_nothing_has_no_direction() -> None:
    assert to_unit([0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10**6}]}),
        ("/v1/embeddings", {"input": "x" * 10**6}),
        ("/tokenize", {"prompt": "x" * 10**6}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 10**6}]}),
    ],
)
def test_a_text_that_can_never_fit_is_refused_without_tokenizing_it(
    wire: Wire, path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object) -> list[int]:
        raise AssertionError("this must not be tokenized")

    monkeypatch.setattr(wire.state.get_model(None).encoder.tokenizer, "_encode_raw", encode)
    error = wire.refused(path, body, invalid(path), "context_length_exceeded")
    assert f"{'input' if 'input' in body else 'prompt'} has at least" in error["message"]
    assert "shorten the prompt" in error["message"]
    assert error["param"] == next(iter(body)), "the client's own field is to blame"

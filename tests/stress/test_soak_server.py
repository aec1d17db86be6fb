"""The soak of `make soak`: what it reads, how it judges, and a short run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.memory_taker import Holder, Neighbour
from benchmarks.soak_server import (
    Answer,
    Reading,
    Seen,
    Window,
    drift_of_cycles,
    find_difference,
    main,
    read_answer,
)
from infer.bench.sse_client import BrokenAnswer


def reading(second: float, num_bytes: int, cycle: int = -1) -> Reading:
    return Reading(
        second=second, api_bytes=num_bytes, engine_bytes=0, gpu_bytes=0, api_files=1, engine_files=1,
        num_engines=1, cycle=cycle,
    )  # fmt: skip


def test_pieces_of_a_stream_are_the_texts_of_the_whole_answer() -> None:
    frames = [
        {"id": "1", "choices": [{"index": 1, "text": "b"}]},
        {"id": "2", "choices": [{"index": 0, "text": "a"}]},
        {"id": "3", "choices": [{"index": 0, "text": "c", "finish_reason": "stop"}]},
    ]
    raw = b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)
    whole = {"choices": [{"index": 0, "text": "ac", "finish_reason": "stop"}, {"index": 1, "text": "b"}]}
    streamed = read_answer("/v1/completions", raw + b"data: [DONE]\n\n", is_stream=True)
    assert streamed == read_answer("/v1/completions", json.dumps(whole).encode(), is_stream=False)
    with pytest.raises(BrokenAnswer, match="ended early, after 3 events"):
        read_answer("/v1/completions", raw, is_stream=True)


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/v1/chat/completions", b'data: {"error": {"message": "the engine died"}}\n\ndata: [DONE]\n\n'),
        ("/v1/messages", b'data: {"type": "error", "error": {"message": "the engine died"}}\n\n'),
        (
            "/v1/responses",
            b'data: {"type": "response.failed", "response": {"error": {"message": "the engine died"}}}\n\n',
        ),
        ("/api/chat", b'{"error": "the engine died"}\n'),
    ],
)
def test_an_error_in_a_stream_is_named(path: str, raw: bytes) -> None:
    with pytest.raises(BrokenAnswer, match="the engine died"):
        read_answer(path, raw, is_stream=True)


def test_texts_are_compared_exactly_and_numbers_with_a_tolerance() -> None:
    def answer(text: str, embedding: list[float], logprob: float) -> list[Answer]:
        made = {"text": text, "data": [{"index": 0, "embedding": embedding}], "logprobs": {"a": logprob}}
        return [read_answer("/v1/embeddings", json.dumps(made).encode(), is_stream=False)]

    first = answer("x", [0.5, -1e-4], -20.0)
    assert find_difference(first, answer("x", [0.5000004, -1.05e-4], -20.0001)) == ""
    assert find_difference(first, answer("y", [0.5, -1e-4], -20.0)) == ".text was 'x', alone 'y'"
    assert ".embedding was" in find_difference(first, answer("x", [0.5, -1.2e-4], -20.0))
    assert ".embedding was" in find_difference(first, answer("x", [0.5], -20.0))
    assert ".logprobs.a was" in find_difference(first, answer("x", [0.5, -1e-4], -20.001))
    assert find_difference(first, []) == "1 answers, alone 0"


def test_the_logprobs_of_a_stream_stay_apart() -> None:
    frames = [{"choices": [{"index": 0, "logprobs": {"token_logprobs": [x]}}]} for x in (-1.5, -2.5)]
    raw = b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in frames)
    read = read_answer("/v1/completions", raw + b"data: [DONE]\n\n", is_stream=True)
    assert read == {".choices[0].logprobs.token_logprobs[0]": [-1.5, -2.5]}


def test_errors_are_expected_only_while_an_engine_is_down_or_a_model_leaves() -> None:
    seen = Seen(windows=[Window("kill", 10, 20), Window("unload", 30, 65)])
    down, gone = BrokenAnswer("no engine", 503), BrokenAnswer("no model", 404)
    seen.fail("schema", down, 5, 12)
    seen.fail("schema", BrokenAnswer("error event: the engine process was ended"), 5, 12)
    seen.fail("second", gone, 35, 36)
    closed = BrokenAnswer("the engine was closed", 503)
    seen.fail("second", closed, 29, 61)  # its drain_timeout is over
    assert sum(seen.expected.values()) == 4 and not seen.unexpected
    seen.fail("schema", down, 21, 22)
    seen.fail("schema", BrokenAnswer("the stream ended early, after 3 events"), 5, 12)
    seen.fail("schema", gone, 35, 36)
    seen.fail("second", closed, 29, 31)
    seen.fail("schema", closed, 29, 61)
    assert sum(seen.unexpected.values()) == 5


def test_drift_is_from_the_second_cycle_to_the_last() -> None:
    cycles = [reading(number, size, number) for number, size in enumerate((50, 100, 104, 103))]
    drift, medians = drift_of_cycles([*cycles, reading(9, 1000)])
    assert medians == [50, 100, 104, 103] and drift == pytest.approx(0.03)
    assert drift_of_cycles(cycles[:2])[0] == 0.0


def test_a_neighbour_takes_what_it_may_and_leaves_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder("cpu", 20 * 2**20, seed=0)
    held = set()
    for _ in range(20):
        holder.change()
        held.add(holder.held)
    assert max(held) == holder.most_held == 20 * 2**20 and len(held) > 3
    monkeypatch.setattr(holder, "_free", lambda: 10 * 2**20 - holder.held)  # as a GPU says what is free
    holder.leaves = 6 * 2**20
    for _ in range(20):
        holder.change()
        assert holder.held <= 4 * 2**20


def test_a_neighbour_is_a_process_that_ends_with_the_soak() -> None:
    with Neighbour("cpu", 0.01, seed=0) as neighbour:
        neighbour.start()
        neighbour.leave(2**30)
        process = neighbour._process
        assert process is not None and process.poll() is None
    assert process.returncode == 0 and "amounts, the largest 0.0 GiB" in neighbour.summary
    with Neighbour("cpu", 0.0, seed=0) as nothing:
        nothing.start()
        nothing.leave(0)
    assert nothing.summary == "none"


@pytest.mark.slow
def test_a_short_soak_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["--minutes", "1.5", "--streams", "12", "--neighbour-gib", "0.2", "--out", str(tmp_path / "soak")]
    )
    report = json.loads((tmp_path / "soak.json").read_text())
    report["faults"].pop("memory", None)  # 18 s are too short for an engine to warm up
    assert not report["faults"], capsys.readouterr().out
    assert code in (0, 1) and report["kills"] == 4 and report["repeated_alone"] > 50

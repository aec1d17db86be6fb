from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from infer.cli.stepping import NUM_SHOWN
from infer.config.settings import EngineConfig
from infer.engine import machine
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.execution.cpu_step import CpuSteps
from infer.execution.gpu.graphs import StepGraphs
from infer.kernels.cpu.library import library
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.tools.record import Record
from infer.tools.replay import Replay
from infer.tools.step_frames import Frame, FrameStepper, StepFrames, with_candidates
from tests.support import tiny
from tests.unit.tools.recorded_runs import make_engine, record_run

PROMPT = tuple(range(20))
SMALL = {"max_batch_size": 3, "max_num_batched_tokens": 12, "prefill_chunk_size": 10, "block_size": 4}


def watched(requests: list[Request], frames: StepFrames, engine: Engine) -> list[Frame]:
    frames.engine = engine
    for request in requests:
        engine.add(request)
    found: list[Frame] = []
    for _ in range(200):
        if not engine.has_work:
            break
        found += frames.take(engine.step(), 0.0125)
    assert not engine.has_work
    return found


def oracle_life(requests: list[Request], **knobs: object) -> list[Frame]:
    frames = StepFrames(num_shown=NUM_SHOWN)
    config = EngineConfig.from_knobs(**(SMALL | knobs))
    return watched(requests, frames, make_engine(frames, policy_config=config))


def ask(name: str, prompt: tuple[int, ...], max_tokens: int = 6, **params: object) -> Request:
    given = SamplingParams.from_knobs(**({"temperature": 0.0, "max_tokens": max_tokens} | params))
    return Request(request_id=name, prompt=prompt, params=given)


def section(frame: Frame, title: str) -> list[str]:
    """The lines of a part of a frame."""
    found = re.search(rf"^{title}.*\n((?:  .*\n)*)", frame.text, re.MULTILINE)
    return [] if found is None else [line[2:] for line in found[1].splitlines()]


@pytest.fixture(scope="module")
def life() -> list[Frame]:
    """A long prompt, one that forks, and one that has to wait and then finds its start cached."""
    return oracle_life([ask("x", PROMPT), ask("y", (*PROMPT[:8], 9, 9), n=2), ask("z", PROMPT[:18])])


def test_frames_are_numbered_like_steps(life: list[Frame]) -> None:
    assert [frame.step for frame in life] == list(range(1, len(life) + 1))


def test_a_frame_as_it_is_printed(life: list[Frame]) -> None:
    assert life[3].text == (
        "step 4: 3 of 12 tokens, 3 sequences, on the host, 12.5 ms\n"
        "plan\n"
        "  A   decode     1 token    position 20\n"
        "  B   decode     1 token    position 10\n"
        "  B2  decode     1 token    position 10\n"
        "      copy       blocks 7>9 (shared, and about to be written)\n"
        "waits\n"
        "  C   18 tokens: no place in the batch of 3\n"
        "sampled\n"
        "  A   '551' (id 551) is the largest logit at position 21\n"
        "  B   '709' (id 709) is the largest logit at position 11\n"
        "  B2  '690' (id 690) is the largest logit at position 11\n"
        "text\n"
        "  A   20 + 2 tokens   ...10|11|12|13|14|15|16|17|18|19|815|551\n"
        "  B   10 + 2 tokens   0|1|2|3|4|5|6|7|9|9|757|709\n"
        "  B2  10 + 2 tokens   0|1|2|3|4|5|6|7|9|9|888|690\n"
        "blocks of 4 tokens: 10 of 16 held by sequences, 0 only cached, 6 free\n"
        "      0 A*  A*  A*  A*  A*  B+  B+  B   A   B\n"
        "  AB: shared by A and B   A+: by more   *: in the prefix tree   o: only there   .: free\n"
    )


def test_a_text_cannot_write_to_the_terminal() -> None:
    frames = StepFrames(num_shown=NUM_SHOWN)
    frames.spell = lambda token_id: "\x1b[2J\r\n\u200b"
    engine = make_engine(frames, policy_config=EngineConfig.from_knobs(**SMALL))
    frame = watched([ask("x", (1,), 1)], frames, engine)[0]
    assert frame.text.replace("\n", "").isprintable()
    piece = r"\x1b[2J\r\n\u200b"
    assert section(frame, "text") == [f"A   1 + 1 tokens   {piece}|{piece}"]


def test_a_long_prompt_shows_its_chunks(life: list[Frame]) -> None:
    of_a = [line for frame in life[:3] for line in section(frame, "plan") if line.startswith("A ")]
    assert of_a == [
        "A   prompt     10 tokens  positions 0 to 9, 10 left",
        "A   prompt     6 tokens   positions 10 to 15, 4 left",
        "A   prompt     4 tokens   positions 16 to 19",
    ]


def test_a_fork_is_announced_and_its_ends_are_told(life: list[Frame]) -> None:
    assert "B   prompt     2 tokens   positions 8 to 9; forks into 2" in section(life[2], "plan")
    assert section(life[7], "ended") == ["A   length", "B   length", "B2  length"]


def test_cached_tokens_are_not_computed_again(life: list[Frame]) -> None:
    assert section(life[8], "plan") == [
        "C   prompt     2 tokens   positions 16 to 17; 16 were in the prefix tree"
    ]
    assert section(life[8], "waits") == []


def test_blocks_of_two_requests_are_marked_as_shared() -> None:
    frames = oracle_life([ask("x", PROMPT[:8], 12), ask("y", PROMPT, 2)], max_num_batched_tokens=8)
    shared = [line for frame in frames for line in section(frame, "blocks") if "AB*" in line]
    assert shared, "the second prompt begins like the first, which still runs"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_says_who_and_what_becomes_of_it(mode: str) -> None:
    requests = [ask("x", PROMPT, 24), ask("y", tuple(range(100, 116)), 24)]
    knobs = {"max_num_batched_tokens": 40, "prefill_chunk_size": 40, "preemption": mode}
    frames = oracle_life(requests, **knobs, swap_blocks=12 if mode == "swap" else 0)
    victim = next(f for f in frames if any("preempted" in line for line in section(f, "plan")))
    assert "B   preempted  its blocks are needed by others" in section(victim, "plan")
    (wait,) = section(victim, "waits")
    past = "swapped out to host memory" if mode == "swap" else "preempted, will recompute"
    assert re.fullmatch(rf"B   \d+ tokens: {past}; needs \d+ blocks, \d+ can be had", wait)
    later = [line for frame in frames for line in section(frame, "plan")]
    assert any(line.lstrip().startswith("swap_in") for line in later) == (mode == "swap")
    assert any(line.startswith("B   recompute ") for line in later) == (mode == "recompute")


def test_one_behind_another_waits_for_it() -> None:
    requests = [ask(name, PROMPT, 3) for name in "vwxyz"]
    first = oracle_life(requests)[0]
    assert section(first, "waits")[-1] == "E   20 tokens: behind C: strictly in order"


def test_a_failed_step_is_a_frame() -> None:
    frames = StepFrames(num_shown=NUM_SHOWN)
    engine = make_engine(frames, policy_config=EngineConfig.from_knobs(**SMALL), fail_at=1)
    (frame,) = watched([ask("x", PROMPT)], frames, engine)
    assert section(frame, "failed") == ["step 1 failed: RuntimeError in step 1"]


def tiny_life(params: SamplingParams, **knobs: Any) -> list[Frame]:
    frames = StepFrames(num_shown=NUM_SHOWN)
    engine = tiny.make_engine(observer=frames, **knobs)
    return watched([Request(request_id="x", prompt=(5, 6, 7, 8) * 3, params=params)], frames, engine)


def test_a_draw_shows_candidates_their_shares_and_what_removed_them() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, min_p=0.01, seed=4, max_tokens=2, logprobs=20)
    lines = section(tiny_life(params)[0], "sampled")
    assert re.fullmatch(
        r"A   '\d+' \(id \d+\) drawn with temperature 0.5, top_k 3, min_p 0.01 by seed 4 at position 12",
        lines[0],
    )
    rows = [re.fullmatch(r" *([\d.]+) % +(?:([\d.]+) %|-) (<-|  ) '\d+' *(.*)", line) for line in lines[2:]]
    assert len(rows) >= NUM_SHOWN
    shares = [float(row[2]) for row in rows if row is not None and row[2]]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.1)
    assert [row[4] for row in rows if row is not None and not row[2]] == ["top_k 3"] * (len(rows) - 3)
    assert sum(row is not None and row[3] == "<-" for row in rows) == 1


def test_a_constraint_shows_what_it_forbids() -> None:
    allowed = (17, 18)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, allowed_token_ids=allowed)
    lines = section(tiny_life(params)[0], "sampled")
    assert re.match(r"A   '1[78]' ", lines[0])
    assert any(line.endswith("the constraint forbids it") for line in lines)


def test_drafts_show_how_many_were_kept() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, ignore_eos=True)
    frames = tiny_life(params, speculative_method="ngram", adaptive_speculation=False)
    verified = [line for frame in frames for line in section(frame, "plan") if " verify " in line]
    assert verified, "a greedy tiny model repeats itself"
    assert all(re.search(r"position \d+, and drafts ('\d+' ?)+: \d kept$", line) for line in verified)


def test_a_watched_run_makes_the_same_ids() -> None:
    prompts = [(prompt, tiny.greedy(8)) for prompt in tiny.random_prompts(4)]
    plain = tiny.run_engine(tiny.make_engine(), prompts)
    frames = StepFrames(num_shown=NUM_SHOWN)
    engine = tiny.make_engine(observer=frames)
    frames.engine = engine
    requests = [
        with_candidates(Request(request_id=str(number), prompt=tuple(prompt), params=params))
        for number, (prompt, params) in enumerate(prompts)
    ]
    made: list[list[int]] = [[] for _ in prompts]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs = engine.step()
        frames.take(outputs, 0.0)
        for output in outputs:
            made[int(output.request_id)].extend(output.token_ids)
    assert [[ids] for ids in made] == plain


def test_a_record_is_replayed_step_by_step(tmp_path: Path) -> None:
    record_run(tmp_path / "run.jsonl", seed=3)
    frames, shown = StepFrames(num_shown=NUM_SHOWN), list[Frame]()

    def build(observer: EngineObserver) -> Engine:
        return make_engine(observer)

    record = Record(tmp_path / "run.jsonl")
    report = Replay(record, build, FrameStepper(frames, shown.append)).run()
    assert report.difference is None
    assert [frame.step for frame in shown] == [
        event.step for event in record.events() if type(event).__name__ == "Ran"
    ]


def heading(**knobs: Any) -> str:
    """The first line of the last frame of a short answer."""
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, ignore_eos=True)
    return tiny_life(params, **knobs)[-1].text.splitlines()[0]


def test_a_frame_names_the_path_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "PyTorch, eager" in heading(attention_backend="torch_ref")
    assert ("C kernels, one by one" if library() else "PyTorch, eager") in heading(record_cpu_step=False)
    monkeypatch.setattr(CpuSteps, "is_recorded", lambda self, num_tokens: True)  # as of a model in int8
    assert ("C program" if library() else "PyTorch, eager") in heading()


def test_a_frame_names_the_path_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device half of a GPU runs on a CPU with the references of its kernels, and captures no graph."""
    monkeypatch.setattr(machine, "has_gpu_kernels", lambda *_, **__: True)
    assert "kernel by kernel" in heading(use_overlap=False)
    monkeypatch.setattr(StepGraphs, "is_captured", lambda self, size: True)
    assert re.search(r"CUDA graph for \d+ rows, ", heading(use_overlap=False))

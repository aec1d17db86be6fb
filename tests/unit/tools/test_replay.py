from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from infer.cache.memory import CacheSize, size_cache
from infer.config.resolve import resolve_scheduler
from infer.config.settings import EngineConfig
from infer.engine.build import build_engine
from infer.engine.engine import Engine
from infer.engine.observer import EngineObserver
from infer.errors import ConfigError
from infer.execution.device import StepResult
from infer.execution.order import StepMasks, StepOrder
from infer.loader.find.source import resolve_model
from infer.loader.load import load_model
from infer.sampling.params import NO_TOKEN, SamplingParams
from infer.scheduling.request import Request, StepOutput
from infer.tools.record import Record, Recorder
from infer.tools.replay import Replay, check_threads, describe_state, replay_config, replay_model
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.books import check_books
from tests.support.thinned import thinned
from tests.unit.tools.recorded_runs import CONFIG, make_engine, make_facts, make_request, record_run


def rewrite(path: Path, number: int, **change: Any) -> None:
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    lines[number] |= change
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def find(path: Path, kind: str, field: str) -> int:
    """The place of the first line of this kind that has something in this field."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return next(i for i, line in enumerate(lines) if line["kind"] == kind and any(line[field]))


@pytest.mark.parametrize("seed", range(6))
def test_a_busy_run_comes_out_again_bit_for_bit(tmp_path: Path, seed: int) -> None:
    """Preemptions, swaps, forks, aborts and shared prefixes included."""
    engine = record_run(tmp_path / "r.jsonl", seed=seed)
    record = Record(tmp_path / "r.jsonl")
    report = Replay(record, make_engine).run()
    assert report.difference is None
    assert report.is_whole
    assert report.num_steps == record.num_steps > 10
    assert report.step == engine.scheduler.step
    assert engine.scheduler.num_preemptions > 0  # the run was worth repeating


def test_a_record_from_before_there_were_orders_replays(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record_run(path)
    header, *rest = path.read_text().splitlines(keepends=True)
    assert '"version":2' in header
    path.write_text(header.replace('"version":2', '"version":1') + "".join(rest))
    report = Replay(Record(path), make_engine).run()
    assert report.difference is None and report.num_steps > 10


@pytest.mark.parametrize(("seed", "fail_at"), thinned(range(4), (None, 40), keep=2))
def test_a_run_with_steps_ahead_comes_out_again_bit_for_bit(
    tmp_path: Path, seed: int, fail_at: int | None
) -> None:
    """Requests come and leave between the same two steps, however many are under way."""
    depths: Counter[int] = Counter()
    step = Engine.step

    def note(engine: Engine) -> list[StepOutput]:
        depths[len(engine._flights)] += 1
        return step(engine)

    ahead: dict[str, Any] = {"steps_ahead": 3, "fail_at": fail_at}
    with mock.patch.object(Engine, "step", note):
        engine = record_run(tmp_path / "r.jsonl", seed=seed, num_requests=30, pace=0.15, **ahead)
    recorded = depths.copy()
    assert min(recorded[number] for number in range(4)) > 3
    assert engine.scheduler.num_preemptions > 0
    record = Record(tmp_path / "r.jsonl")
    depths.clear()
    with mock.patch.object(Engine, "step", note):
        replay = Replay(record, partial(make_engine, **ahead))
        report = replay.run()
    assert report.difference is None
    assert report.is_whole
    assert report.num_steps == record.num_steps > 50
    assert depths - recorded == Counter(), "no call that was not made then"
    for until in range(30, 40, 3):  # where tokens are on their way
        halfway = Replay(record, partial(make_engine, **ahead))
        assert halfway.run(until=until).difference is None
        assert f"after step {until}:" in describe_state(halfway.engine)
        check_books(halfway.engine.scheduler.pool)


def test_recording_a_replay_gives_the_same_record(tmp_path: Path) -> None:
    record_run(tmp_path / "r.jsonl", seed=3)
    with Recorder(tmp_path / "again.jsonl") as recorder:
        recorder.on_start(make_facts())

        def build(witness: EngineObserver) -> Engine:
            return make_engine(recorder)

        Replay(Record(tmp_path / "r.jsonl"), build).run(check=False)

    def told(path: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for line in lines:
            line.pop("t", None)
            line.get("request", {}).pop("cache_salt", None)  # hashed once more
        return lines

    assert told(tmp_path / "again.jsonl") == told(tmp_path / "r.jsonl")


def test_the_first_wrong_id_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record_run(path)
    place = find(path, "step", "ids")
    line = json.loads(path.read_text("utf-8").splitlines()[place])
    ids = line["ids"]
    chunk = next(i for i, row in enumerate(ids) if row)
    was = list(ids[chunk])
    ids[chunk][0] += 1
    rewrite(path, place, ids=ids)
    report = Replay(Record(path), make_engine).run()
    assert report.difference == (
        f"step {line['step']}: sampled ids, number {chunk}: in the record {ids[chunk]}, now {was}"
    )
    assert Replay(Record(path), make_engine).run(check=False).difference is None


@pytest.mark.parametrize("name", ["preempted", "transfers", "chunks"])
def test_another_plan_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.jsonl"
    record_run(path)
    place = find(path, "step", name)
    step = json.loads(path.read_text("utf-8").splitlines()[place])["step"]
    change: dict[str, Any] = {name: []} | ({"ids": []} if name == "chunks" else {})
    rewrite(path, place, **change)
    report = Replay(Record(path), make_engine).run()
    assert report.difference is not None
    assert report.difference.startswith(f"step {step}: {name}, number 0: in the record none, now ")


def test_another_policy_parts_from_the_record(tmp_path: Path) -> None:
    record_run(tmp_path / "r.jsonl")
    other = replace(CONFIG, scheduler=replace(CONFIG.scheduler, scheduler_policy="prefill_first"))

    def build(observer: EngineObserver) -> Engine:
        return make_engine(observer, policy_config=other)

    report = Replay(Record(tmp_path / "r.jsonl"), build).run()
    assert report.difference is not None
    assert report.difference.startswith("step ")


def test_a_failure_must_happen_again(tmp_path: Path) -> None:
    record_run(tmp_path / "r.jsonl", fail_at=5)
    record = Record(tmp_path / "r.jsonl")
    again = Replay(record, lambda observer: make_engine(observer, fail_at=5)).run()
    assert again.difference is None
    report = Replay(record, make_engine).run()
    assert report.difference is not None
    assert "in the record it failed (RuntimeError in step" in report.difference


def test_a_step_that_ran_and_broke_one_request_comes_out_again(tmp_path: Path) -> None:
    """A row without a token: the record has the step and, with the same number, the failure."""

    def build(observer: EngineObserver, *, broken_at: int | None = 5) -> Engine:
        engine = make_engine(observer)
        device: Any = engine._device
        compute = device.compute

        def compute_with_a_broken_row(order: StepOrder, masks: StepMasks) -> StepResult:
            result: StepResult = compute(order, masks)
            if order.step == broken_at:
                result.ids[-1] = (NO_TOKEN,)
                result.logprobs[-1] = (None,)
            return result

        device.compute = compute_with_a_broken_row
        return engine

    path, rng = tmp_path / "r.jsonl", random.Random(2)
    with Recorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = build(recorder)
        for number in range(8):
            engine.add(make_request(number, rng))
            engine.step()
        while engine.has_work:
            engine.step()
    place = find(path, "failure", "error")
    report = Replay(Record(path), build).run()
    assert report.difference is None
    assert report.step == engine.scheduler.step
    assert Replay(Record(path), lambda observer: build(observer, broken_at=None)).run().difference is not None
    rewrite(path, place, error="something else")
    report = Replay(Record(path), build).run()
    assert report.difference is not None
    assert report.difference.startswith(
        "step 5: in the record it failed (something else), now: the request's"
    )


def test_it_stops_after_a_step_and_shows_the_state(tmp_path: Path) -> None:
    record_run(tmp_path / "r.jsonl", seed=1)
    replay = Replay(Record(tmp_path / "r.jsonl"), make_engine)
    report = replay.run(until=9)
    assert report.step == replay.engine.scheduler.step == 9
    assert report.num_steps <= 9
    text = describe_state(replay.engine)
    running = replay.engine.scheduler.running
    assert text.startswith(f"after step 9: {len(running)} running, ")
    seq = running[0]
    blocks = replay.engine.scheduler.pool.block_tables(seq.seq_id)[0]
    assert f"sequence {seq.seq_id} of '{seq.group.request.request_id}'[{seq.index}]" in text
    assert f"computed {seq.num_computed} of {seq.num_tokens}" in text
    assert "blocks " + " ".join(map(str, blocks)) in text
    assert "cache: num_blocks 16, " in text


def test_the_size_chosen_at_start_is_given_when_it_is_built_again() -> None:
    for backend, size in [("paged", CacheSize(37, 16, 8)), ("contiguous", CacheSize(3, 21, 8))]:
        config = EngineConfig.from_knobs(kv_cache_backend=backend, kv_cache_memory="1GiB")
        facts = replace(make_facts(config), cache=size, context_len=21)
        again = replay_config(facts, None)
        scheduler = resolve_scheduler(again, 21)
        made = size_cache(again.cache, scheduler, max_seq_len=21, bytes_per_token=8, free_bytes=0)
        assert made == size


def test_host_blocks_of_a_rank_are_as_many_when_one_process_repeats_them() -> None:
    """`swap_space` is bytes of one rank, whose blocks are smaller than those of the whole model."""
    config = EngineConfig.from_knobs(tensor_parallel_size=2, swap_space="2KiB", kv_cache_memory="1GiB")
    facts = replace(make_facts(config), cache=CacheSize(37, 16, 8, 1, 16), context_len=21)
    again = replay_config(facts, None)
    made = size_cache(again.cache, resolve_scheduler(again, 21), max_seq_len=21, bytes_per_token=16,
                      free_bytes=0)  # fmt: skip
    assert made.num_host_blocks == 16


def test_a_record_with_the_former_names_of_knobs_is_built_again() -> None:
    facts = make_facts()
    former = {
        "swap_blocks": "num_host_blocks",
        "max_queue": "max_waiting",
        "record_cpu_step": "use_cpu_program",
    }
    former["prefill_tokens_while_decoding"] = "mixed_prefill_tokens"
    old = {former.get(name, name): value for name, value in facts.knobs.items()}
    assert old.keys() != facts.knobs.keys()
    assert replay_config(replace(facts, knobs=old), None) == replay_config(facts, None)


def test_knobs_of_another_release_are_refused() -> None:
    facts = make_facts()
    with pytest.raises(ConfigError, match="knobs that this release lacks: warp"):
        replay_config(replace(facts, knobs={**facts.knobs, "warp": 9}), None)
    with pytest.raises(ConfigError, match="block_size must be int"):
        replay_config(replace(facts, knobs={**facts.knobs, "block_size": "4"}), None)


@pytest.mark.parametrize("knob", ["scheduler_policy", "block_allocator", "speculative_method"])
def test_code_that_a_record_names_is_not_loaded(knob: str, tmp_path: Path) -> None:
    facts, path = make_facts(), tmp_path / "evil.py"
    path.write_text("raise SystemExit('it ran')\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"user's own code \\({knob}\\)"):
        replay_config(replace(facts, knobs={**facts.knobs, knob: f"{path}:x"}), None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
    make_checkpoint("llama", folder)
    return folder


def record_model(model: Path, path: Path, **knobs: Any) -> None:
    config = EngineConfig.from_knobs(model=str(model), **knobs)
    loaded = load_model(resolve_model(str(model)), dtype=config.load.dtype, device="cpu")
    with Recorder(path) as recorder:
        engine = build_engine(config, loaded, observer=recorder)
        for number in range(5):
            params = SamplingParams(max_tokens=8, temperature=0.9, seed=number, n=1 + number % 2)
            engine.add(Request(request_id=str(number), prompt=tuple(range(3, 20 + number)), params=params))
            engine.step()
        engine.abort("1")
        while engine.has_work:
            engine.step()


def test_a_real_model_runs_again_with_the_records_own_knobs(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record_model(model, path, dtype="float32", num_blocks=9, swap_blocks=4, block_size=8)
    record = Record(path)
    assert record.facts.cost.recompute_seconds != 1.0  # it was measured
    replay = replay_model(record, str(model), device=None, show_progress=False)
    report = replay.run()
    assert report.difference is None
    assert report.num_steps == record.num_steps
    assert replay.engine.scheduler.cost == record.facts.cost


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record_model(model, path, dtype="float32", num_blocks=20)
    make_checkpoint("llama", tmp_path / "other", sizes=Sizes(num_layers=1))
    with pytest.raises(ConfigError, match="the record was made with tiny-llama .* give the recorded model"):
        replay_model(Record(path), str(tmp_path / "other"), device=None, show_progress=False)


def test_other_weights_of_the_same_config_give_a_difference(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record_model(model, path, dtype="float32", num_blocks=20)
    make_checkpoint("llama", tmp_path / "tiny-llama", seed=1)
    report = replay_model(Record(path), str(tmp_path / "tiny-llama"), device=None, show_progress=False).run()
    assert report.difference is not None
    assert "sampled ids" in report.difference


@pytest.mark.parametrize("num_threads", [0, -1, 10**9])
def test_a_record_cannot_ask_for_threads_that_are_not_there(num_threads: int) -> None:
    check_threads(1)
    with pytest.raises(ConfigError, match=f"made with {num_threads} CPU threads, but this machine runs 1 to"):
        check_threads(num_threads)


def test_a_run_stopped_with_ctrl_c_replays_up_to_there(tmp_path: Path) -> None:
    """What was interrupted cannot be interrupted again at the same place, and need not be."""
    path = tmp_path / "r.jsonl"
    with Recorder(path) as recorder:
        recorder.on_start(make_facts())
        engine = make_engine(recorder)
        engine.add(make_request(1, random.Random(3)))
        engine.step()

        def interrupt(plan: object) -> None:
            raise KeyboardInterrupt

        runner: Any = engine._device
        runner.run = interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    report = Replay(Record(path), make_engine).run()
    assert report.difference is None
    assert report.is_whole  # its last line says why
    assert report.num_steps == 1

"""An order is all that a device is told: a second process that gets the orders of a run draws the same ids.

The traffic has everything that changes a device's state: prefixes that are cached, prompts in chunks, swaps,
forks, beams, drafts, aborts, constraints, penalties, biases, logprobs of outputs and prompts, embeddings.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.cli.main import main
from infer.engine.engine import Engine
from infer.execution.device import PendingStep, StepResult
from infer.execution.gpu.device import GpuDevice
from infer.execution.order import DECODE, PROMPT, VERIFY, StepMasks, StepOrder
from infer.execution.torch_device import TorchDevice
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.support.second_device import SecondDevice, make_engine

pytest.importorskip("llguidance")

KNOBS: dict[str, Any] = {
    "num_blocks": 24,
    "block_size": 4,
    "swap_blocks": 40,
    "preemption": "swap",
    "max_batch_size": 8,
    "max_num_batched_tokens": 24,
    "prefill_chunk_size": 9,
}
START = [(place * 37) % 300 + 20 for place in range(18)]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1, "logprobs": 2},
    {"repetition_penalty": 1.3, "temperature": 0.8, "seed": 2},
    {"n": 2, "temperature": 1.0, "seed": 3, "frequency_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"use_beam_search": True, "n": 2},
    {"logit_bias": {5: 4.0, 30: -3.5}, "min_tokens": 4, "stop_token_ids": (7, 30, 31)},
    {"structured": {"json_schema": SCHEMA}, "temperature": 1.0, "seed": 4},
    {"structured": {"regex": "[a-c]{3,9}"}, "logprobs": 0},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("orders") / "qwen3"
    make_checkpoint("qwen3", directory, sizes=Sizes(vocab_size=397, context_len=96))
    return str(directory)


class _Step:
    """A step of the engine's own device whose result is compared with that of the second one."""

    def __init__(self, step: PendingStep, order: StepOrder, second: SecondDevice) -> None:
        self._step, self._number, self._second = step, order.step, second

    def masks(self, count: int) -> np.ndarray:
        return self._step.masks(count)

    def sample(self, numbers: list[int], positions: list[int]) -> StepMasks:
        masks = self._step.sample(numbers, positions)
        self._second.sample(self._number, masks)
        return masks

    def wait(self) -> StepResult:
        ours, theirs = self._step.wait(), self._second.wait(self._number)
        assert theirs.ids == ours.ids, self._number
        assert theirs.logprobs == ours.logprobs, self._number
        assert theirs.prompt_logprobs == ours.prompt_logprobs, self._number
        assert {number: state.tolist() for number, state in theirs.pooled.items()} == {
            number: state.tolist() for number, state in ours.pooled.items()
        }
        return ours


def tell_both(engine: Engine, second: SecondDevice) -> list[StepOrder]:
    """Let a second device have every order of an engine; returns them as they come."""
    device: Any = engine.device
    run, orders = device.run, list[StepOrder]()

    def run_both(order: StepOrder) -> _Step:
        orders.append(order)
        second.run(order)
        return _Step(run(order), order, second)

    device.run = run_both
    return orders


def traffic(engine: Engine, seed: int = 0) -> None:
    """Serve random requests on a cache that is far too small for them, and propose drafts now and then."""
    rng, number = random.Random(seed), 0
    while number < 28 or engine.has_work:
        if number < 28 and rng.random() < 0.5:
            shared = START[: rng.randrange(len(START))] if rng.random() < 0.6 else []
            prompt = (*shared, *(rng.randrange(20, 390) for _ in range(rng.randint(1, 20))))
            params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | KINDS[number % len(KINDS)]))
            pooling = ("mean", "last")[number % 2] if number % 13 == 12 else None
            if pooling:
                params = SamplingParams()
            engine.add(Request(request_id=f"r{number}", prompt=prompt, params=params, pooling=pooling))
            number += 1
        if rng.random() < 0.04 and number:
            engine.abort(f"r{rng.randrange(number)}")
        if rng.random() < 0.3 and not engine._flights:
            propose(engine, rng)
        outputs = engine.step()
        assert not any(output.finish_reason == "error" for output in outputs), outputs


def propose(engine: Engine, rng: random.Random) -> None:
    """Give sequences that decode some drafts, which are guesses."""
    for seq in engine.scheduler.running:
        is_plain = not (seq.is_beam or seq.group.request.params.is_guided or seq.num_samples != 1)
        if is_plain and seq.num_pending == 1 and seq.num_output > 0 and not seq.drafts:
            engine.scheduler.propose(seq, [rng.choice((25, 60, 61)) for _ in range(rng.randint(1, 3))])


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_a_second_process_draws_the_same_from_the_orders(checkpoint: str, on_gpu: bool) -> None:
    engine = make_engine(checkpoint, KNOBS, on_gpu=on_gpu)
    assert isinstance(engine.device, GpuDevice if on_gpu else TorchDevice)
    second = SecondDevice(checkpoint, KNOBS, on_gpu=on_gpu)
    try:
        orders = tell_both(engine, second)
        traffic(engine)
    finally:
        second.close()
    kinds = {int(kind) for order in orders for kind in order.kinds}
    moved = {kind for order in orders for kind, _, _ in order.moves()}
    assert kinds == {DECODE, PROMPT, VERIFY} and moved == {"copy", "swap_out", "swap_in"}
    assert engine.stats().num_hit_tokens > 0
    assert any(order.num_draws.max(initial=0) > 1 for order in orders), "none forked"


def texts_of(engine: Engine, prompts: list[list[int]], params: list[SamplingParams], drafts: int) -> Any:
    """What requests get when sequences compute this many drafts with each step, right ones among them."""
    plain: dict[str, list[int]] = {}
    for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(request_id=str(number), prompt=tuple(prompt), params=wanted))
    num_steps = 0
    while engine.has_work:
        for seq in engine.scheduler.running if drafts and not engine._flights else ():
            if seq.num_pending == 1 and seq.num_output > 0:
                right = TEXTS.get(seq.request_id, [])[seq.num_output : seq.num_output + drafts]
                guesses = [*right[: 1 + seq.num_output % 3], 11, 12, 13][:drafts]
                engine.scheduler.propose(seq, guesses)
        for output in engine.step():
            plain.setdefault(output.request_id, []).extend(output.token_ids)
            plain.setdefault(f"{output.request_id} logprobs", []).extend(
                row.token_id for row in output.logprobs
            )
        num_steps += 1
    return plain, num_steps


TEXTS: dict[str, list[int]] = {}


@pytest.fixture
def _forget_texts() -> Iterator[None]:
    TEXTS.clear()
    yield
    TEXTS.clear()


@pytest.mark.usefixtures("_forget_texts")
@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
def test_drafts_change_no_token(checkpoint: str, on_gpu: bool) -> None:
    """Greedy and drawn, with penalties and logprobs: a row that verifies draws what it would draw."""
    prompts = [[20 + 3 * place + number for place in range(4 + number)] for number in range(5)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "seed": 5, "min_tokens": 6, "stop_token_ids": tuple(range(0, 390, 4))},
    ]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, **kind) for kind in kinds]
    engine = make_engine(checkpoint, {"num_blocks": 64, "use_overlap": False}, on_gpu=on_gpu)
    expected, num_steps = texts_of(engine, prompts, params, drafts=0)
    TEXTS.update(expected)
    with_drafts, num_fewer = texts_of(engine, prompts, params, drafts=3)
    assert with_drafts == expected
    assert num_fewer < 0.7 * num_steps, "right drafts save steps"


def test_a_record_of_orders_runs_on_the_device_alone(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    knobs = ["--model", checkpoint, "--device", "cpu", "--dtype", "float32"]
    schema = json.dumps(SCHEMA)
    asked = [
        "generate",
        "a b c",
        "--max-tokens",
        "9",
        "--json-schema",
        schema,
        "--record",
        str(path),
        "--raw",
    ]
    asked += ["--prefill-chunk-size", "1"]  # the first steps await masks and sample no row
    assert main([*asked, "--orders", *knobs]) == 0
    capsys.readouterr()
    assert main(["replay", str(path), "--orders", "--model", checkpoint]) == 0
    assert "orders" in (said := capsys.readouterr().out) and "identical" in said
    assert main(["replay", str(path), "--model", checkpoint]) == 0, "with the scheduler as well"
    assert main(["replay", str(path), "--orders", "--until", "3", "--model", checkpoint]) == 0
    assert "3 orders" in capsys.readouterr().out
    lines = path.read_text().splitlines()
    changed = [line.replace('"ids":[[', '"ids":[[1') for line in lines]
    path.write_text("\n".join(changed) + "\n")
    assert main(["replay", str(path), "--orders", "--model", checkpoint]) == 1
    assert "the device differs at step 1: row 0" in capsys.readouterr().out


def test_a_record_without_orders_says_how_to_get_them(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    knobs = ["--model", checkpoint, "--device", "cpu", "--dtype", "float32"]
    assert main(["generate", "a b", "--max-tokens", "2", "--record", str(path), "--raw", *knobs]) == 0
    assert main(["replay", str(path), "--orders", "--model", checkpoint]) == 2
    assert "--orders" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of a record with orders and masks."""
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    knobs = ["--model", checkpoint, "--device", "cpu", "--dtype", "float32", "--raw", "--max-tokens", "6"]
    asked = ["generate", "a b c", "--regex", "[a-c]{6,9}", "--record", str(path), "--orders"]
    assert main([*asked, *knobs]) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


def first(lines: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(line for line in lines if line["kind"] == kind)


def damage_masks(lines: list[dict[str, Any]]) -> None:
    first(lines, "masks")["data"] = "AAAA"


def move_masks(lines: list[dict[str, Any]]) -> None:
    first(lines, "masks")["positions"] = [99]


def repeat_order(lines: list[dict[str, Any]]) -> None:
    lines.insert(lines.index(first(lines, "masks")) + 1, first(lines, "order"))


def rename_order(lines: list[dict[str, Any]]) -> None:
    first(lines, "order")["step"] += 1


def drop_masks(lines: list[dict[str, Any]]) -> None:
    lines.remove(first(lines, "masks"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damage_masks, "line 4: its masks cannot be unpacked"),
        (move_masks, "at positions that it does not sample"),
        (repeat_order, "it comes after the order of step 1"),
        (rename_order, "line 3: the line says step 2, its order says step 1"),
        (drop_masks, "no masks, of step 1"),
    ],
)
def test_a_damaged_record_of_orders_is_refused(
    checkpoint: str,
    recorded: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    said: str,
) -> None:
    lines = json.loads(json.dumps(recorded))
    change(lines)
    path = tmp_path / "damaged.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(path), "--orders", "--model", checkpoint]) == 2
    assert said in capsys.readouterr().err


def test_a_record_that_was_cut_off_says_so(
    checkpoint: str, recorded: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, last = tmp_path / "cut.jsonl", max(i for i, line in enumerate(recorded) if line["kind"] == "step")
    path.write_text("".join(json.dumps(line) + "\n" for line in recorded[:last]))
    assert main(["replay", str(path), "--orders", "--model", checkpoint]) == 0
    assert "the record has no end: the steps of its last 1 orders" in capsys.readouterr().out

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.config.defaults import SIMULATED_STEPS
from infer.config.profiles.cpu import CPU
from tests.unit.cli.terminal import Terminal, infer_command

Infer = Callable[..., Any]

PAGE = Path(__file__).parents[3] / "docs" / "features" / "simulator.md"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "day.jsonl"
    lines = [{"arrival": i / 100, "prompt_len": 20, "output_len": 5, "priority": i % 2} for i in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_table_has_a_row_for_every_policy_and_size(infer: Infer, trace: Path) -> None:
    outcome = infer("simulate", "--trace", str(trace), "--policy", "fcfs,priority", "--num-blocks", "8,32")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == "day.jsonl: 8 requests, 40 output tokens"
    assert [line.split()[:2] for line in lines if line.startswith(("fcfs", "priority"))] == [
        ["fcfs", "8"],
        ["priority", "8"],
        ["fcfs", "32"],
        ["priority", "32"],
    ]
    assert " late " not in outcome.out  # no request has a deadline
    assert "…" not in outcome.out


def test_a_table_wider_than_the_terminal_is_cut_into_several(trace: Path) -> None:
    words = infer_command("simulate", "--trace", str(trace), "--policy", "fcfs", "--num-blocks", "64")
    with Terminal(words, env={}, columns=60) as terminal:
        assert terminal.end() == 0
        lines = terminal.text.splitlines()
        assert max(map(len, lines[:-1])) <= 60
        rows = [line for line in lines if line.startswith("fcfs ")]
        assert len(rows) == sum(line.startswith("policy  blocks ") for line in lines) > 1
        assert "steps/s" in terminal.text


def test_help_and_page_say_how_large_a_simulated_step_is(infer: Infer) -> None:
    usual, here = CPU.steps.usual, SIMULATED_STEPS
    assert f"has up to {here.batched_tokens} tokens, any number of them" in infer("simulate", "--help").out
    page = " ".join(PAGE.read_text("utf-8").split())
    assert f"has up to {here.batched_tokens:,} tokens and {here.batch_size} sequences" in page
    limits = "--max-num-batched-tokens {} --prefill-tokens-while-decoding {}"
    assert here.mixed_tokens is None and limits.format(usual.batched_tokens, usual.mixed_tokens) in page


def test_json_holds_every_figure(infer: Infer, trace: Path) -> None:
    arguments = ["--trace", str(trace), "--policy", "all", "--num-blocks", "32", "--json"]
    outcome = infer("simulate", *arguments, "--cost", '{"base": 1, "per_token": 0, "per_kv_token": 0}')
    told = json.loads(outcome.out)
    assert told["load"] == "day.jsonl"
    assert told["num_requests"] == 8
    assert told["cost"]["base"] == 1
    policies = [row["policy"] for row in told["results"]]
    assert policies == ["fcfs", "prefill_first", "decode_round_robin", "priority", "deadline"]
    assert {row["num_finished"] for row in told["results"]} == {8}


def test_ranks_are_compared_on_given_links(infer: Infer, trace: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    links = ["--link-bandwidth", "450", "--link-latency", "6", "--model", str(tmp_path / "config.json")]
    load = ["simulate", "--trace", str(trace), "--policy", "fcfs", "--num-blocks", "32"]
    outcome = infer(*load, "--tensor-parallel-size", "1,4", *links, "--json")
    one, four = json.loads(outcome.out)["results"]
    assert (one["num_ranks"], four["num_ranks"], one["communication_seconds"]) == (1, 4, 0.0)
    assert four["compute_seconds"] < one["compute_seconds"] and four["seconds"] < one["seconds"]
    least = four["num_steps"] * 2 * 3 * 6e-6  # six all-reduces in every step
    assert least < four["communication_seconds"] < 1.1 * least
    table = infer(*load, "--tensor-parallel-size", "2", *links).out
    assert "ranks" in table and "links" in table
    assert "ranks" not in infer(*load).out
    assert (
        "needs --link-bandwidth, --link-latency, --model" in infer(*load, "--tensor-parallel-size", "2").err
    )
    assert "--link-bandwidth is for several ranks" in infer(*load, *links).err
    assert (
        "must be gigabytes per second above 0, for example 450" in infer(*load, "--link-bandwidth", "x").err
    )
    assert "must be microseconds above 0, for example 6" in infer(*load, "--link-latency", "0").err
    assert "ranks" in infer(*load, "-tp", "2", *links).out
    assert "stages of a pipeline are not simulated" in infer(*load, "-pp", "2").err


def test_a_built_in_workload_is_the_same_every_time(infer: Infer) -> None:
    arguments = ["--workload", "bursty", "--num-requests", "20", "--policy", "fcfs", "--json"]

    def results(*more: str) -> list[dict[str, Any]]:
        rows = json.loads(infer("simulate", *arguments, *more).out)["results"]
        return [row | {"steps_per_real_second": 0} for row in rows]

    assert results() == results("--seed", "0") != results("--seed", "1")
    assert " late " in infer("simulate", *arguments[:-1]).out


def test_knobs_and_a_config_file_reach_the_scheduler(infer: Infer, trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("model: org/name\nmax_batch_size: 1\nnum_blocks: 40\nscheduler_policy: priority\n")
    [row] = json.loads(infer("simulate", "--trace", str(trace), "--config", str(config), "--json").out)[
        "results"
    ]
    assert (row["policy"], row["num_blocks"]) == ("priority", 40)
    assert row["num_steps"] == 40  # one at a time
    arguments = ["--config", str(config), "--max-batch-size", "8", "--policy", "fcfs", "--json"]
    [row] = json.loads(infer("simulate", "--trace", str(trace), *arguments).out)["results"]
    assert row["policy"] == "fcfs"
    assert row["num_steps"] < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a load: --trace FILE, or --workload with one of mixed, shared_prefix, long_prompts"),
        (
            ["--workload", "weather"],
            "workload must be one of mixed, shared_prefix, long_prompts, bursty, newcomers",
        ),
        (
            ["--workload", "burst"],
            "workload must be one of mixed, shared_prefix, long_prompts, bursty, newcomers, got 'burst'; did "
            "you mean 'bursty'?",
        ),
        (["--workload", "mixed", "--policy", "best"], "--policy must be all, or some of fcfs"),
        (["--workload", "mixed", "--trace", "a.jsonl"], "--trace and --workload both name a load;"),
        (["--trace", "absent.jsonl"], "cannot read absent.jsonl"),
        (["--trace", "absent.jsonl", "--seed", "1"], "--seed is for --workload"),
        (["--workload", "mixed", "--cost", "{"], "the cost is not JSON"),
    ],
)
def test_an_impossible_simulation_is_refused_in_one_line(
    infer: Infer, arguments: list[str], message: str
) -> None:
    outcome = infer("simulate", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(f"infer: error: {message}")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-blocks", "12,many"], "--num-blocks must be whole numbers of 1 or more, separated by commas"),
        (["--num-blocks", "0"], "--num-blocks must be whole numbers of 1 or more, separated by commas"),
        (["--num-requests", "0"], "--num-requests must be a whole number of 1 or more, for example 300"),
    ],
)
def test_numbers_of_nothing_are_refused(infer: Infer, arguments: list[str], message: str) -> None:
    outcome = infer("simulate", "--workload", "mixed", *arguments)
    assert outcome.code == 2
    assert f"infer simulate: error: {message}" in outcome.err


def test_flags_that_would_do_nothing_do_not_exist(infer: Infer) -> None:
    for flag in ("--model", "--dtype", "--attention-backend", "--kv-cache-memory"):
        assert infer("simulate", "--workload", "mixed", flag, "auto").code == 2


def page_commands() -> list[list[str]]:
    """Every `infer simulate` of the page, as its arguments."""
    return [
        shlex.split(line)[1:] for line in re.findall(r"^infer simulate .*$", PAGE.read_text("utf-8"), re.M)
    ]


def test_the_table_of_the_page_is_what_its_command_prints(infer: Infer) -> None:
    """But for the last column, which is about the machine that simulates."""
    [command] = [found for found in page_commands() if "--policy" in found and "bursty" in found]
    printed = infer(*command).out.splitlines()
    header = next(number for number, line in enumerate(printed) if line.startswith("policy"))
    rows = [line.split()[:-1] for line in (printed[header], *printed[header + 1 : -2])]
    [table] = re.findall(r"^```\n( +TTFT .*?)```", PAGE.read_text("utf-8"), re.M | re.S)
    assert [line.split() for line in table.splitlines()[1:]] == rows
    assert len(rows) == 7


def test_the_small_example_of_the_page_is_late_once(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [trace] = re.findall(r"^```json\n(.*?)```", PAGE.read_text("utf-8"), re.M | re.S)
    (tmp_path / "t.jsonl").write_text(trace)
    monkeypatch.chdir(tmp_path)
    [command] = [found for found in page_commands() if "--trace" in found]
    results = json.loads(infer(*command, "--json").out)["results"]
    assert [(row["longest_queue_wait"], row["num_late"]) for row in results] == [(10.0, 1), (2.0, 0)]

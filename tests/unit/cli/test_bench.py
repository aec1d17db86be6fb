from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from benchmarks.bench import BENCHES
from infer.bench.report import make_report, make_row, read_report, write_report
from infer.bench.roofline import Ceilings
from infer.cli import bench as bench_cli
from infer.errors import EngineError
from tests.unit.cli.conftest import Outcome

Infer = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def with_the_repositorys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks of benchmarks/bench.py next to those of `infer bench`."""
    monkeypatch.setattr(bench_cli, "BENCHES", bench_cli.BENCHES | BENCHES)


def write(path: Path, *values: float) -> str:
    row = make_row("w", "", [{"output_tokens_per_s": value} for value in values])
    facts = {"model": {}, "config": {}, "seed": 1, "repeats": len(values), "warmup": 0}
    write_report(make_report("offline", [row], **facts), path)  # type: ignore[arg-type]
    return str(path)


def test_compare_says_what_changed_and_fails_if_it_got_worse(infer: Infer, tmp_path: Path) -> None:
    fast, slow = write(tmp_path / "a.json", 100.0, 101.0), write(tmp_path / "b.json", 80.0, 81.0)
    worse = infer("bench", "compare", fast, slow)
    assert worse.code == 1
    assert "worse" in worse.out and "-19.9%" in worse.out
    better = infer("bench", "compare", slow, fast)
    assert better.code == 0 and "1 better, 0 worse, 0 same" in better.out
    same = infer("bench", "compare", fast, fast, "--all")
    assert same.code == 0 and "+0.0%" in same.out


def test_reports_are_named_as_they_were_written(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--out before` writes before.json, and `compare before after` reads it."""
    monkeypatch.chdir(tmp_path)
    write(Path("before.json"), 100.0)
    assert infer("bench", "compare", "before", "before.json").code == 0
    outcome = infer("bench", "compare", "before", "after")
    assert outcome.code == 2
    assert "cannot read the report after.json: No such file or directory" in outcome.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"a": 1}), "{path} is not a benchmark report: unknown key 'a'"),
        ("[]", "the report {path}: expected `object`, got `array`"),
        ("21:48 INFO ready", "the report {path}: expected `object`, got `int`"),
        ("", "the report {path} is not JSON: "),
    ],
)
def test_a_report_that_is_none_is_refused(infer: Infer, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    outcome = infer("bench", "compare", str(path), str(path))
    assert outcome.code == 2
    assert outcome.err.startswith(f"infer: error: {message.format(path=path)}")


def test_reports_of_different_things_are_not_compared(infer: Infer, tmp_path: Path) -> None:
    policies = Path(__file__).parents[3] / "benchmarks" / "reports" / "policies.json"
    outcome = infer("bench", "compare", write(tmp_path / "a.json", 100.0), str(policies))
    assert outcome.code == 2
    assert "nothing to compare" in outcome.err and "0 better" not in outcome.out


def test_a_picture_is_refused_before_the_work_if_it_cannot_be_drawn(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.charts.can_draw", lambda: False)
    outcome = infer("bench", "matrix", "--png", str(tmp_path / "x.png"))
    assert outcome.code == 2
    assert "--png needs matplotlib: pip install 'infer[bench]'" in outcome.err


def test_the_matrix_is_drawn(infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart in the terminal, and the same numbers for matplotlib, which need not be installed."""
    row = make_row("+paged w1_single", "", [{"speed_up": 1.5}], note="it is faster.")
    report = make_report("matrix", [row], model={}, config={}, seed=1, repeats=1, warmup=0)
    pyplot = MagicMock()
    pyplot.subplots.return_value = (MagicMock(), MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock(pyplot=pyplot))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    monkeypatch.setattr("benchmarks.charts.can_draw", lambda: True)
    monkeypatch.setattr("infer.bench.target.open_target", lambda *args, **options: None)
    monkeypatch.setattr("benchmarks.matrix.bench_matrix", lambda *args, **options: report)
    path = tmp_path / "x.png"
    outcome = infer("bench", "matrix", "--png", str(path))
    assert outcome.code == 0, outcome.err
    assert "█ 1.5x" in outcome.out and "+paged w1_single: it is faster." in outcome.out
    figure, axes = pyplot.subplots.return_value
    assert axes.barh.call_args.args == (["+paged w1_single"], [0.5])  # from the line at 1 to 1.5
    figure.savefig.assert_called_once_with(path)
    figure.savefig.side_effect = ValueError("format 'pgn' is not supported")
    outcome = infer("bench", "matrix", "--png", str(path))
    assert outcome.code == 2 and "cannot write the chart" in outcome.err


def test_a_report_that_cannot_be_written_is_refused_before_the_work(infer: Infer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = infer("bench", "matrix", "--out", str(tmp_path / "file" / "r.json"))
    assert outcome.code == 2
    assert "cannot write the report" in outcome.err


def test_an_interrupted_run_is_written_and_says_so_in_its_exit_code(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(command: list[str]) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.micro.first_byte_s", stop)
    outcome = infer("bench", "startup", "--out", str(tmp_path / "s.json"))
    assert outcome.code == 130
    assert read_report(tmp_path / "s.json").is_partial
    assert "interrupted" in outcome.out


def test_a_command_that_fails_is_not_timed(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is not there must not look like one that answers at once."""

    def fail(command: list[str]) -> float:
        if "generate" in command:
            raise EngineError("no such model here")
        return 0.1

    monkeypatch.setattr("benchmarks.micro.first_byte_s", fail)
    outcome = infer("bench", "startup", "--out", str(tmp_path / "s.json"))
    assert outcome.code == 1
    assert "first token: failed: no such model" in outcome.out
    assert {row.name: row.skipped for row in read_report(tmp_path / "s.json").rows}["first token"] == (
        "failed: no such model here"
    )


def test_without_a_command_there_is_help(infer: Infer) -> None:
    outcome = infer("bench")
    assert outcome.code == 2
    assert "infer bench serve" in outcome.err


def test_policies_are_compared_without_a_model(infer: Infer, tmp_path: Path) -> None:
    outcome = infer("bench", "policies", "--num-requests", "6", "--out", str(tmp_path / "p"))
    assert outcome.code == 0, outcome.err
    assert "mixed prefill_first" in outcome.out
    assert read_report(tmp_path / "p.json").kind == "policies"
    assert "| `mixed fcfs` |" in (tmp_path / "p.md").read_text()


def test_a_model_whose_name_is_not_utf8_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["infer", "bench", "decode", "--model", "/models/a\udcff"])
    model = {"name": "a\udcff"}
    report = make_report("decode", [], model=model, config={}, seed=1, repeats=1, warmup=0)
    write_report(report, tmp_path / "d.json")
    found = read_report(tmp_path / "d.json")
    assert found.model["name"] == "a\N{REPLACEMENT CHARACTER}"
    assert found.command.endswith("--model 'a\N{REPLACEMENT CHARACTER}'")


def test_a_tiny_model_is_timed_and_reported(
    infer: Infer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, matmul_flops_per_s=1e9)  # to measure them takes seconds
    monkeypatch.setattr("infer.bench.offline.measure_ceilings", lambda device, dtype: ceilings)
    path = tmp_path / "d.json"
    arguments = ("decode", "--tiny", "--batches", "1,2", "--context", "8", "--steps", "3", "--repeats", "2")
    outcome = infer("bench", *arguments, "--device", "cpu", "--num-threads", "1", "--out", str(path))
    assert outcome.code == 0, outcome.err
    assert "batch 2" in outcome.out
    report = read_report(path)
    assert (report.kind, report.repeats, report.config["num_threads"]) == ("decode", 2, 1)
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("offline", "--tiny", "--workload", "nan256"), "did you mean 'nano256'"),
        (
            ("decode", "--tiny", "--batches", "1,x"),
            "--batches must be whole numbers of 1 or more, separated by commas, for example 1,8,32, got",
        ),
        (
            ("offline", "--model", "a", "--model-config", "b"),
            "--model and --model-config both name a model; give one of them",
        ),
        (("decode", "--tiny", "--model", "a"), "--model and --tiny both name a model; give one of them"),
        (("matrix", "--tiny", "--model-config", "b"), "--model-config and --tiny both name a model"),
        (("serve", "--url", "nowhere"), "must start with http://"),
        (("serve", "--url", "http://127.0.0.1:9"), "is the server running"),
        (("serve", "--port", "99999"), "got 'http://127.0.0.1:99999': Port out of range"),
        (("trace", "--url", "http://host:x"), "--url must be an address such as http://127.0.0.1:8000, got"),
        (("trace", "--url", "http://[::1"), "--url must be an address such as"),
        (("trace", "--url", f"http://{'h' * 64}"), "--url must be an address such as"),
        (("trace", "--url", "http://a b"), "got 'http://a b': there is white space in it"),
        (("serve", "--host", "a b"), "got 'http://a b:8000': there is white space in it"),
        (("trace", "--url", "http://:80"), "got 'http://:80': it names no host"),
        (("serve", "--url", "http://127.0.0.1:9", "--slo", "x"), "an SLO looks like"),
        (("matrix", "--repeats", "0"), "must be a whole number of 1 or more"),
        (("serve", "--url", "http://127.0.0.1:9", "--warmup", "-1"), "must be a whole number of 0 or more"),
        (("serve", "--url", "http://127.0.0.1:9"), "connection refused"),
        (("serve", "--url", "http://127.0.0.1:9", "--timeout", "nan"), "--timeout must be a number above 0"),
        (("serve", "--url", "http://127.0.0.1:9", "--timeout", "0"), "--timeout must be a number above 0"),
        (("serve", "--url", "http://127.0.0.1:9", "--wait", "-3"), "--wait must be a number of 0 or more"),
        (("compare", "a", "b", "--noise", "inf"), "--noise must be a number of 0 or more"),
    ],
)
def test_mistakes_are_explained(infer: Infer, arguments: tuple[str, ...], message: str) -> None:
    outcome = infer("bench", *arguments)
    assert outcome.code == 2
    assert message in outcome.err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What `infer bench serve` would ask: its endpoint and its plan."""
    calls: list[tuple[Any, Any]] = []
    report = make_report("serve", [], model={}, config={}, seed=1, repeats=1, warmup=0)

    def note(endpoint: Any, plan: Any, **options: Any) -> Any:
        calls.append((endpoint, plan))
        return report

    monkeypatch.setattr("infer.bench.serve.bench_server", note)
    return calls


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (["--url", "http://a:1"], "http://a:1"),
        (["--base-url", "http://a:1"], "http://a:1"),
        (["--port", "9000"], "http://127.0.0.1:9000"),
        (["--host", "there"], "http://there:8000"),
        (["--host", "::1", "--port", "9"], "http://[::1]:9"),
    ],
)
def test_a_server_is_named_as_other_benchmarks_do(
    infer: Infer, asked: list[tuple[Any, Any]], arguments: list[str], url: str
) -> None:
    assert infer("bench", "serve", *arguments).code == 0
    assert asked[0][0].url == url
    assert "random" not in asked[0][1].workloads


def test_one_server_is_measured_with_and_without_drafts(infer: Infer, asked: list[tuple[Any, Any]]) -> None:
    for more in (), ("--num-speculative-tokens", "0"), ("--num-speculative-tokens", "3"):
        assert infer("bench", "serve", "--port", "1", *more).code == 0
    found = [endpoint.extra.get("num_speculative_tokens") for endpoint, _ in asked]
    assert found == [None, 0, 3]


@pytest.mark.parametrize("prefix", ["--", "--random-"])
def test_a_load_is_described_as_other_benchmarks_do(
    infer: Infer, asked: list[tuple[Any, Any]], prefix: str
) -> None:
    sizes = [f"{prefix}input-len", "30", f"{prefix}output-len", "7"]
    pace = ["--num-prompts", "5", "--request-rate", "2.5", "--max-concurrency", "3"]
    assert infer("bench", "serve", "--port", "1", *sizes, *pace).code == 0
    [(_, plan)] = asked
    assert plan.workloads == ["random"]
    workload = plan.make("random")
    assert [(len(session.turns[0].ids), session.turns[0].max_tokens) for session in workload.sessions] == [
        (30, 7)
    ] * 5
    assert workload.arrival.describe() == "open loop, 2.5 per second (Poisson), at most 3 at once"
    assert workload.sessions[-1].start_s > 0
    assert plan.make("random") == workload != replace(plan, seed=1).make("random")


def test_a_load_without_a_rate_comes_at_once(infer: Infer, asked: list[tuple[Any, Any]]) -> None:
    infer("bench", "serve", "--port", "1", "--num-prompts", "5", "--request-rate", "inf")
    infer("bench", "serve", "--port", "1", "--workload", "random,w1_single", "--max-concurrency", "4")
    (_, first), (_, second) = asked
    assert first.make("random").arrival.describe() == "open loop, all at once"
    assert second.make("random").arrival.describe() == "closed loop, 4 at once"
    assert (second.workloads, second.random.num_prompts) == (["random", "w1_single"], 1000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://a", "--port", "1"], "--url names the server already; leave out --host and --port"),
        (
            ["--port", "1", "--num-prompts", "5", "--workload", "all"],
            "--num-prompts is for the workload random, and --workload all is another load",
        ),
        (["--port", "1", "--input-len", "5", "--duration", "9"], "and --duration is another load"),
        (
            ["--port", "1", "--request-rate", "0"],
            "--request-rate must be a number above 0, or 'inf', for example 0.5, got '0'",
        ),
    ],
)
def test_a_load_that_contradicts_itself_is_refused(
    infer: Infer, asked: list[tuple[Any, Any]], arguments: list[str], said: str
) -> None:
    outcome = infer("bench", "serve", *arguments)
    assert outcome.code == 2 and said in outcome.err
    assert not asked


def test_ctrl_c_before_the_first_figure_says_so(infer: Infer, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infer.bench.serve.bench_server", press)
    outcome = infer("bench", "serve", "--port", "1")
    assert (outcome.code, outcome.err) == (130, "interrupted before there was a figure to report\n")

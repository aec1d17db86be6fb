"""The command as a user runs it, on a tiny checkpoint.

A process of its own takes 2.7 s of a core, most of it imports. There is one where that could matter:
for a pipe, an error before anything is loaded, a signal. All else is `main` in this process.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from infer.cli.generate import EXAMPLES
from infer.cli.main import main
from scripts.make_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-qwen3"
    make_checkpoint("qwen3", folder)
    # what tells a chat model from a base model; which template is used follows from the family all the same
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def infer(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    out, err, words = io.StringIO(), io.StringIO(), [*map(str, arguments)]
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "stdin", io.StringIO(stdin)):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def infer_process(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infer", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=120)


def generate_json(*arguments: str | Path) -> dict[str, object]:
    done = infer("generate", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_the_same_seed_gives_the_same_text_streamed_or_not(model: Path) -> None:
    flags = ("--model", model, "--seed", "7", "--temperature", "1", "--max-tokens", "12")
    answer = generate_json("once upon", *flags)
    streamed = infer("generate", "once upon", *flags)
    assert streamed.stdout == f"{answer['text']}\n"
    assert answer["seed"] == 7
    assert generate_json("once upon", "--model", model, "--seed", "8", *flags[4:]) != answer


def test_usage_counts_the_templates_tokens_too(model: Path) -> None:
    flags = ("--model", model, "--temperature", "0", "--max-tokens", "3", "--ignore-eos")
    plain = generate_json("hello", "--raw", *flags)
    chat = generate_json("hello", *flags)
    assert plain["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]  # type: ignore[index]
    assert len(chat["token_ids"]) == 3  # type: ignore[arg-type]
    assert chat["finish_reason"] == "length"


def test_knobs_change_the_way_and_not_the_tokens(model: Path) -> None:
    flags = ("--model", model, "--raw", "--temperature", "0", "--max-tokens", "16", "--dtype", "float32")
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    tokens = [
        generate_json(prompt, *flags, *knobs)["token_ids"]
        for knobs in ([], ["--kv-cache-backend", "naive"], ["--kv-cache-backend", "contiguous"])
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_prompt_comes_from_a_pipe(model: Path) -> None:
    flags = ("--model", model, "--raw", "--temperature", "0", "--max-tokens", "4")
    piped = infer_process("generate", *flags, stdin="once upon\n")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == infer("generate", "once upon", *flags).stdout


def test_a_conversation_over_a_pipe_answers_each_line(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = f"hello\n/system be brief\nand you?\n/save {saved}\n"
    done = infer("chat", "--model", model, "--max-tokens", "4", "--seed", "1", stdin=lines)
    assert done.returncode == 0, done.stderr
    roles = [message["role"] for message in json.loads(saved.read_text("utf-8"))]
    assert roles == ["system", "user", "assistant", "user", "assistant"]


def test_errors_are_one_line_on_standard_error(model: Path, tmp_path: Path) -> None:
    for run, arguments in (
        (infer_process, ("hi", "--model", tmp_path / "absent")),
        (infer, ("hi", "--model", model, "--max-seq-len", "100000000")),
        (infer, ("hi " * 2000, "--model", model, "--raw", "--max-seq-len", "64")),
        (infer, ("hi", "--model", model, "--chat-template", tmp_path / "absent.jinja")),
    ):
        done = run("generate", *arguments)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("infer: error: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_the_prompts_of_a_file_run_together_and_get_what_they_get_alone(model: Path, tmp_path: Path) -> None:
    flags = ("--model", model, "--raw", "--seed", "7", "--max-tokens", "12", "--ignore-eos")
    prompts, record = tmp_path / "prompts.txt", tmp_path / "run.jsonl"
    prompts.write_text("once upon\n" + "a river " * 500 + "\nthe cat\n")
    done = infer("generate", "--json", "--prompts-file", prompts, "--record", record, *flags)
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1, done.stderr
    assert second["line"] == 2 and "this model's maximum context length is" in second["error"]
    assert first["seed"] == 7 != third["seed"]
    alone = generate_json("the cat", *flags, "--seed", str(third["seed"]))
    assert third["token_ids"] == alone["token_ids"]
    assert third["usage"]["completion_tokens"] == 12
    assert '"step":13' not in record.read_text().replace(" ", "")  # 12 steps answer both


@pytest.mark.slow
def test_ctrl_c_ends_generate_with_130(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hi\n" * 2000)  # enough to be busy until the signal comes, on the slowest machine
    command = [sys.executable, "-m", "infer", "generate", "--prompts-file", str(prompts)]
    flags = ["--model", str(model), "--ignore-eos", "--seed", "1"]
    with subprocess.Popen(
        [*command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # a shell may have it off
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "it has begun to write"
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130
        assert b"Traceback" not in error


@pytest.mark.network
def test_the_default_model_answers_a_question() -> None:
    question = "What is the capital of France? Answer in one word."
    answer = generate_json(question, "--temperature", "0", "--max-tokens", "16")
    assert "Paris" in str(answer["text"])
    assert answer["finish_reason"] == "stop"


@pytest.mark.network
def test_the_example_with_choices_gets_the_right_answer_of_the_default_model() -> None:
    [example] = [line for line in EXAMPLES.splitlines() if "--choice" in line]
    name, *arguments = shlex.split(example)
    assert name == "infer"
    assert infer(*arguments).stdout == "blue\n"

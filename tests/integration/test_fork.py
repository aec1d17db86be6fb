"""A process that has made an `LLM` forks: the child is told so at once, or computes, and never hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infer.errors import EngineError
from infer.loader.load import choose_device
from scripts.make_checkpoint import Sizes, make_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
LIMIT_S = 10  # for a child, which would otherwise wait forever

REFUSED = (
    "llm.generate(given, params)",
    "llm.generate([1], guided)",
    "llm.chat('Hi', params)",
    "llm.embed([1, 2, 3])",
    "llm.stream([1], params)",
    "next(open_stream)",
    "asyncio.run(async_llm.generate([1], params))",
    "asyncio.run(async_llm.chat('Hi', params))",
    "asyncio.run(async_llm.embed([1]))",
    "async_llm.abort('1')",
)
WORKS = {
    "len(LLM(MODEL, num_blocks=64, num_threads=2).generate(given, guided))": "gave 2",
    "len(asyncio.run(AsyncLLM(MODEL, num_blocks=64).generate([1], params)).token_ids)": "gave 3",
    "len(llm.encode('word ' * 500)) > 99": "gave True",
    "(llm.close(), open_stream.close())": "gave (None, None)",
    "asyncio.run(async_llm.close())": "gave None",
}

# The parent computes with two threads and forks once for each line; the child prints what the line gives.
SCRIPT = """
import asyncio, os, signal, sys
import torch
from infer import LLM, AsyncLLM, SamplingParams

torch.set_num_threads(2)
(torch.randn(900, 900) @ torch.randn(900, 900)).exp()  # OpenMP's threads are started
params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
guided = SamplingParams(max_tokens=3, structured={"json_object": True})
given = [[1, 2, 3] * 60, [4] * 150]
MODEL = sys.argv[1]
async_llm = AsyncLLM(MODEL, num_blocks=64)
asyncio.run(async_llm.generate(given[0], params))
llm = LLM(MODEL, num_blocks=64)
llm.generate(given, guided)
llm.encode("word " * 500)
open_stream = llm.stream(given[0], params)
next(open_stream)
for line in sys.argv[2:]:
    if os.fork() == 0:
        signal.alarm(LIMIT_S)
        try:
            print("gave", eval(line), flush=True)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        print("the child ended by signal", status & 127, flush=True)
""".replace("LIMIT_S", str(LIMIT_S))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fork") / "llama"
    make_checkpoint("llama", path, sizes=Sizes(vocab_size=300, context_len=256), seed=1)
    return path


def test_a_forked_child_is_refused_or_computes(model: Path) -> None:
    lines = [*REFUSED, *WORKS]
    command = [sys.executable, "-c", SCRIPT, str(model), *lines]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    said = dict(zip(lines, result.stdout.strip().split("\n"), strict=True))
    for line in REFUSED:
        assert said[line].startswith("EngineError this "), (line, said[line])
        assert "spawn" in said[line] and "make one in the child" in said[line]
    assert {line: said[line] for line in WORKS} == WORKS
    assert "a forked child computes with one thread" in result.stderr


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_is_refused_in_a_child_of_a_process_that_used_one(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(EngineError, match="spawn.*or set device to cpu"):
        choose_device(device)
    assert choose_device("cpu").type == "cpu"

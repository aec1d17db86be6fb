"""A model on this CPU, the default one if none is named: our engine beside its peers, in the same run.

    python -m benchmarks.cpu_peers --threads 1 --out benchmarks/reports/cpu.json
    python -m benchmarks.cpu_peers --peer-python path/to/python      an environment with llama-cpp-python
    python -m benchmarks.cpu_peers --model FILE.gguf --engines "ours int8" "llama.cpp Q8_0"
    python -m benchmarks.cpu_peers --threads 2 --http --llama-server path/to/llama-server

Every engine is a process of its own, and the engines take turns: one round of all of them, then the
next, so that whatever else the machine does meets them all. The figure is the median of the rounds.

    decode 1     tokens per second of one sequence, after a prompt of 16 tokens
    decode 8     of eight sequences together
    prefill      tokens per second of a prompt of 512
    http 1, 8    with `--http`: tokens per second of a server with one stream and with eight, each a question
                 of about 80 tokens and an answer of 64; `ttft_s` is the median time to the first token

A server's rate holds its prompts: `loop_per_s` and `loop_per_cpu_s`, beside it, are what the three figures
above would make of the same work, so the difference is what HTTP, scheduling and waiting cost. Where no
llama-server is found, only our engine is measured so.

Each is given by the clock and per second of processor time (of all threads of the process together).
On a machine that others use as well only the second one compares; read the first with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

DECODE_TOKENS, PROMPT, PREFILL = 48, 16, 512
STREAMS, QUESTION, ANSWER, START_S = (1, 8), 80, 64, 120
OURS = ("ours int8", "ours int4", "ours fp32", "ours int8 fast", "ours int4 fast")
PEERS = ("transformers fp32", "llama.cpp Q8_0", "llama.cpp Q4_0")


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of processor time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def rates(num_tokens: int, seconds: tuple[float, float]) -> dict[str, float]:
    """Tokens per second by both clocks."""
    return {"per_s": round(num_tokens / seconds[0], 1), "per_cpu_s": round(num_tokens / seconds[1], 1)}


def three_figures(generate: Callable[[int, int, int], None]) -> dict[str, Any]:
    """The figures of an engine with `generate(rows, prompt length, new tokens)`; it must be warm.

    Decoding alone is the difference between making many tokens and making one.
    """

    def decode(rows: int) -> dict[str, float]:
        first = timed(lambda: generate(rows, PROMPT, 1))
        whole = timed(lambda: generate(rows, PROMPT, DECODE_TOKENS + 1))
        return rates(rows * DECODE_TOKENS, (whole[0] - first[0], whole[1] - first[1]))

    return {
        "decode 1": decode(1),
        "decode 8": decode(8),
        "prefill": rates(PREFILL, timed(lambda: generate(1, PREFILL, 1))),
    }


def measure_ours(path: Path, weights: str, threads: int) -> dict[str, Any]:
    """The engine as `LLM` runs it: scheduler, sampling and all."""
    from infer import LLM, SamplingParams

    kept, _, digits = weights.partition(" ")
    llm = LLM(
        str(path),
        quantization=kept,
        cpu_products=digits or "exact",
        device="cpu",
        num_threads=threads,
        max_seq_len=1024,
        use_prefix_caching=False,
    )

    def generate(rows: int, length: int, max_tokens: int) -> None:
        prompts = [[1000 + row + at for at in range(length)] for row in range(rows)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

    generate(8, PROMPT, 4)
    return three_figures(generate)


def measure_transformers(path: Path, threads: int) -> dict[str, Any]:
    """Greedy decoding with its own cache, float32; random weights of the right shape cost the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from infer.loader.formats.gguf import read_gguf
    from infer.loader.formats.gguf_config import hf_config_from_gguf

    torch.set_num_threads(threads)
    shape = hf_config_from_gguf(read_gguf(path))
    config = AutoConfig.for_model(shape.pop("model_type", "llama"), **shape)
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32).eval()

    def generate(rows: int, length: int, max_tokens: int) -> None:
        ids = torch.arange(1000, 1000 + length).repeat(rows, 1)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    generate(1, PROMPT, 2)
    return three_figures(generate)


def measure_llama(path: Path, threads: int) -> dict[str, Any]:
    """llama.cpp through its C API: a batch of tokens per call, nothing sampled."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8 * 1024, 512, 512, 8
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(512, 0, 8)

    def run(entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wants_logits
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_synchronize(context)

    def prefill(rows: int, length: int) -> None:
        llama_cpp.llama_memory_clear(memory, True)
        for row in range(rows):
            run([(1000 + at, at, row, at == length - 1) for at in range(length)])

    def decode(rows: int) -> dict[str, float]:
        prefill(rows, PROMPT)

        def steps() -> None:
            for at in range(PROMPT, PROMPT + DECODE_TOKENS):
                run([(1000 + at, at, row, True) for row in range(rows)])

        return rates(rows * DECODE_TOKENS, timed(steps))

    prefill(1, PREFILL)
    return {
        "decode 1": decode(1),
        "decode 8": decode(8),
        "prefill": rates(PREFILL, timed(lambda: prefill(1, PREFILL))),
    }


def server_command(
    engine: str, path: Path, threads: int, port: int, llama_server: str | None
) -> list[str] | None:
    """The command of an engine's server; None where it has none here."""
    family, _, kind = engine.partition(" ")
    kept, _, digits = kind.partition(" ")
    if family == "ours":
        command = [sys.executable, "-m", "infer", "serve", str(path), "--device", "cpu"]
        return [
            *command, "--port", str(port), "--quantization", kept, "--cpu-products", digits or "exact",
            "--num-threads", str(threads), "--max-seq-len", "1024", "--log-level", "warning",
        ]  # fmt: skip
    if family == "llama.cpp" and llama_server is not None:
        sizes = ["-c", str(8 * 1024), "-np", "8"]
        return [llama_server, "-m", str(path), "--port", str(port), "-t", str(threads), *sizes]
    return None


def http_figures(command: list[str], port: int) -> dict[str, Any]:
    """What a server makes of one stream and of eight, and the processor time of all of its processes."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(server, port)
        number, figures = 0, {}
        asyncio.run(_ask_all(port, range(-8, 0)))  # what is allocated and compiled by the first of all
        for streams in STREAMS:
            num_rounds = max(1, 4 // streams)
            wall, cpu = time.perf_counter(), _cpu_seconds(server.pid)
            waits: list[float] = []
            for _ in range(num_rounds):
                waits += asyncio.run(_ask_all(port, range(number, number + streams)))
                number += streams
            seconds = time.perf_counter() - wall, _cpu_seconds(server.pid) - cpu
            figures[f"http {streams}"] = {
                **rates(num_rounds * streams * ANSWER, seconds),
                "ttft_s": round(statistics.median(waits), 3),
            }
        return figures
    finally:
        server.terminate()
        server.wait()


def in_the_loop(figures: dict[str, Any], streams: int) -> dict[str, float]:
    """Tokens per second that the figures without HTTP would make of the same questions and answers."""
    found = {}
    for clock in ("per_s", "per_cpu_s"):
        seconds = QUESTION / figures["prefill"][clock] + ANSWER / figures[f"decode {streams}"][clock]
        found[f"loop_{clock}"] = round(ANSWER / seconds, 1)
    return found


def _wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{server.args!r} did not get ready")


async def _ask_all(port: int, numbers: range) -> list[float]:
    return await asyncio.gather(*(_ask(port, number) for number in numbers))


async def _ask(port: int, number: int) -> float:
    """Read one answer to its end; the seconds to its first token."""
    text = (
        f"{number}. Explain in plain words {'how a bicycle stays upright while it moves ' * 6}."  # 80 tokens
    )
    asked = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    begun, first, answer = time.perf_counter(), 0.0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    while part := await reader.read(1 << 16):
        answer += part
        if not first and answer.replace(b'"content":""', b"").find(b'"content":"') >= 0:
            first = time.perf_counter() - begun
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and first, answer[:300]
    return first


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process and of those it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return spent + sum(_cpu_seconds(int(child)) for found in children for child in found)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def quantize_for_llama(source: Path, target: Path, name: str) -> None:
    """The model's file in another of llama.cpp's formats: the speed is what matters here."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[
        name
    ]
    params.allow_requantize = True
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) == 0


def measure(engine: str, path: Path, threads: int) -> dict[str, Any]:
    """One engine in this process: its figures, and which version it is."""
    family, _, kind = engine.partition(" ")
    package = {"ours": "infer", "transformers": "transformers", "llama.cpp": "llama_cpp"}[family]
    if family == "ours":
        figures = measure_ours(path, kind, threads)
    elif family == "transformers":
        figures = measure_transformers(path, threads)
    else:
        figures = measure_llama(path, threads)
    version = f"{package} {getattr(sys.modules[package], '__version__', 'of unknown version')}"
    return {"version": version, "figures": figures}


def run_elsewhere(python: str, engine: str, path: Path, threads: int) -> dict[str, Any] | None:
    """One engine in a process of its own; None where it cannot run."""
    command = [python, __file__, "--measure", engine, "--file", str(path), "--threads", str(threads)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if python != sys.executable:  # another environment: only this repository's own modules
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        print(f"{engine}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure."""
    return {
        what: {clock: statistics.median(r[what][clock] for r in rounds) for clock in rounds[0][what]}
        for what in rounds[0]
    }


def main() -> None:
    """Take turns, then print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the default model")
    parser.add_argument("--engines", nargs="+", choices=OURS + PEERS, default=OURS + PEERS)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--http", action="store_true", help="measure servers as well")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--quantize", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    if "--measure" in sys.argv or "--quantize" in sys.argv:  # in the peers' environment, without our packages
        args = parser.parse_args()
    else:
        from benchmarks.machine import facts, parse, write

        args = parse(parser)
    if args.measure:
        print(json.dumps(measure(args.measure, args.file, args.threads)))
        return
    if args.quantize:
        quantize_for_llama(args.file, Path(args.quantize.partition(":")[2]), args.quantize.partition(":")[0])
        return

    from infer.bench.report import revision_of
    from infer.loader.find.default_model import default_model_file

    source = args.model or default_model_file()
    results: dict[str, list[dict[str, Any]]] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        files = dict.fromkeys(args.engines, source)
        for engine in [engine for engine in files if engine.startswith("llama")]:
            name = engine.split()[1]
            target = files[engine] = Path(directory) / f"{name}.gguf"
            subprocess.run(
                [args.peer_python, __file__, "--quantize", f"{name}:{target}", "--file", str(source)],
                capture_output=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            )
        for _ in range(args.rounds):
            for engine, path in files.items():
                python = args.peer_python if engine.startswith("llama") else sys.executable
                if (found := run_elsewhere(python, engine, path, args.threads)) is not None:
                    port = _free_port()
                    command = server_command(engine, path, args.threads, port, args.llama_server)
                    if args.http and command is not None:
                        found["figures"] |= http_figures(command, port)
                    results.setdefault(engine, []).append(found["figures"])
                    versions[engine] = found["version"]
                    print(engine, found, flush=True)
    medians = {engine: median_of(rounds) for engine, rounds in results.items()}
    for figures in medians.values():
        for streams in STREAMS:
            if f"http {streams}" in figures:
                figures[f"http {streams}"] |= in_the_loop(figures, streams)
    report = {
        "machine": facts() | {"architecture": platform.machine()},
        "model": source.name,
        "revision": revision_of(source),
        "threads": args.threads,
        "rounds": args.rounds,
        "versions": versions,
        "load": [round(load, 1) for load in os.getloadavg()],
        "engines": medians,
    }
    print(json.dumps(report, indent=2))
    write(report, args.out)


if __name__ == "__main__":
    main()

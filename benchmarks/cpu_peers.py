"""A model on this CPU, the default one if none is named: our engine beside its peers, in the same run.

    python -m benchmarks.cpu_peers --threads 1 2 --out benchmarks/reports/cpu.json
    python -m benchmarks.cpu_peers --peer-python path/to/python      an environment with llama-cpp-python
    python -m benchmarks.cpu_peers --model FILE.gguf --engines "ours int8" "llama.cpp Q8_0"
    python -m benchmarks.cpu_peers --threads 2 --http --llama-server path/to/llama-server
    python -m benchmarks.cpu_peers --threads 2 --long 4096         a long prompt as well

Every engine is a process of its own, and the engines take turns: one round of all of them, then the
next, so that whatever else the machine does meets them all. The figure is the median of the rounds, and in
each of them of `--repeats` measurements.

    decode 1     tokens per second of one sequence, after a prompt of 16 tokens
    decode 8     of eight sequences together
    prefill      tokens per second of a prompt of 512
    long         of a prompt of as many tokens as `--long` says
    GB/s         bytes of the matrices that one token reads, times `decode 1`
    http 1, 8    with `--http`: tokens per second of a server with one stream and with eight, each a question
                 of about 80 tokens and an answer of 64; `ttft_s` is the median time to the first token
    start        seconds from the command to the server's first 200 at /health

A server's rate holds its prompts: `loop_per_s` and `loop_per_cpu_s`, beside it, are what the three figures
above would make of the same work, so the difference is what HTTP, scheduling and waiting cost. Where no
llama-server is found, only our engine is measured so.

With several numbers of threads, the long prompt and the servers are measured with the largest.

Each is given by the clock and per second of processor time (of all threads of the process together).
On a machine that others use as well only the second one compares; read the first with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import platform
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


class Work(NamedTuple):
    """What is measured of an engine in its process."""

    threads: int
    long: int  # tokens of the long prompt; 0: none
    repeats: int


def repeated(repeats: int, measured: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The median of some measurements, clock by clock."""
    found = [measured() for _ in range(repeats)]
    return {clock: round(statistics.median(one[clock] for one in found), 1) for clock in found[0]}


def all_figures(generate: Callable[[int, int, int], None], work: Work) -> dict[str, Any]:
    """The figures of an engine with `generate(rows, prompt length, new tokens)`; it must be warm.

    Decoding alone is the difference between making many tokens and making one.
    """

    def decode(rows: int) -> dict[str, float]:
        first = timed(lambda: generate(rows, PROMPT, 1))
        whole = timed(lambda: generate(rows, PROMPT, DECODE_TOKENS + 1))
        return rates(rows * DECODE_TOKENS, (whole[0] - first[0], whole[1] - first[1]))

    def prefill(length: int) -> dict[str, float]:
        return rates(length, timed(lambda: generate(1, length, 1)))

    found = {
        "decode 1": repeated(work.repeats, lambda: decode(1)),
        "decode 8": repeated(work.repeats, lambda: decode(8)),
        "prefill": repeated(work.repeats, lambda: prefill(PREFILL)),
    }
    return found | ({"long": prefill(work.long)} if work.long else {})


def measure_ours(path: Path, weights: str, work: Work) -> dict[str, Any]:
    """The engine as `LLM` runs it: scheduler, sampling and all."""
    from infer import LLM, SamplingParams

    kept, _, digits = weights.partition(" ")
    llm = LLM(
        str(path),
        quantization=kept,
        cpu_products=digits or "exact",
        device="cpu",
        num_threads=work.threads,
        max_seq_len=max(1024, work.long + 16),
        use_prefix_caching=False,
    )

    def generate(rows: int, length: int, max_tokens: int) -> None:
        prompts = [[1000 + row + at for at in range(length)] for row in range(rows)]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

    generate(8, PROMPT, 4)
    return all_figures(generate, work)


def measure_transformers(path: Path, work: Work) -> dict[str, Any]:
    """Greedy decoding with its own cache, float32; random weights of the right shape cost the same."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from infer.loader.formats.gguf import read_gguf
    from infer.loader.formats.gguf_config import hf_config_from_gguf

    torch.set_num_threads(work.threads)
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
    return all_figures(generate, work._replace(long=0))


def measure_llama(path: Path, work: Work) -> dict[str, Any]:
    """llama.cpp through its C API: a batch of tokens per call, nothing sampled."""
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    batch = llama_cpp.llama_batch_init(PREFILL, 0, 8)

    def new_context(num_tokens: int, num_sequences: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_sequences * num_tokens, num_sequences
        params.n_batch = params.n_ubatch = PREFILL
        params.n_threads = params.n_threads_batch = work.threads
        return llama_cpp.llama_init_from_model(model, params)

    context = new_context(1024, 8)

    def run(entries: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wants_logits
        assert llama_cpp.llama_decode(context, batch) == 0
        llama_cpp.llama_synchronize(context)

    def prefill(rows: int, length: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        for row in range(rows):
            for start in range(0, length, PREFILL):
                ats = range(start, min(length, start + PREFILL))
                run([(1000 + at, at, row, at == length - 1) for at in ats])

    def decode(rows: int) -> dict[str, float]:
        prefill(rows, PROMPT)

        def steps() -> None:
            for at in range(PROMPT, PROMPT + DECODE_TOKENS):
                run([(1000 + at, at, row, True) for row in range(rows)])

        return rates(rows * DECODE_TOKENS, timed(steps))

    prefill(1, PREFILL)
    found = {
        "decode 1": repeated(work.repeats, lambda: decode(1)),
        "decode 8": repeated(work.repeats, lambda: decode(8)),
        "prefill": repeated(work.repeats, lambda: rates(PREFILL, timed(lambda: prefill(1, PREFILL)))),
    }
    if work.long:
        context = new_context(work.long + 64, 1)
        found["long"] = rates(work.long, timed(lambda: prefill(1, work.long)))
    return found


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
    begun = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(server, port)
        figures: dict[str, Any] = {"start": {"s": round(time.perf_counter() - begun, 2)}}
        number = 0
        asyncio.run(_ask_all(port, range(-8, 0)))  # what is allocated and compiled by the first of all
        for streams in STREAMS:
            num_rounds = max(3, 4 // streams)
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
            time.sleep(0.02)
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


def measure(engine: str, path: Path, work: Work) -> dict[str, Any]:
    """One engine in this process: its figures, which version it is, and what it uses of the processor."""
    family, _, kind = engine.partition(" ")
    package = {"ours": "infer", "transformers": "transformers", "llama.cpp": "llama_cpp"}[family]
    if family == "ours":
        from infer.kernels.cpu.library import library

        figures = measure_ours(path, kind, work)
        built = library()
        uses = "PyTorch" if built is None else built.variant
    elif family == "transformers":
        import torch

        figures, uses = (
            measure_transformers(path, work),
            f"PyTorch, {torch.backends.cpu.get_cpu_capability()}",
        )
    else:
        import llama_cpp

        figures = measure_llama(path, work)
        uses = llama_cpp.llama_print_system_info().decode().strip(" |")
    version = f"{package} {getattr(sys.modules[package], '__version__', 'of unknown version')}"
    return {"version": version, "instruction_set": uses, "figures": figures}


def matrix_bytes(engine: str, path: Path) -> int:
    """Bytes of the matrices that one token multiplies with: all of the file's but an untied embedding."""
    from infer.loader.formats.gguf import read_gguf

    tensors = dict(read_gguf(path).tensors)
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    if engine.startswith("llama"):
        return sum(tensor.num_bytes for tensor in tensors.values())
    bits = 32.0 if "fp32" in engine else 5.0 if "int4" in engine else 8.5
    matrices = (tensor for tensor in tensors.values() if len(tensor.shape) > 1)
    is_head = {"output.weight", "token_embd.weight"}
    of = {name: max(bits, 8.5) if name in is_head else bits for name in tensors}
    return round(sum(math.prod(each.shape) * of[each.name] / 8 for each in matrices))


def why_it_ended(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a process that failed; of one that a signal stopped, the signal as well."""
    last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
    if done.returncode >= 0:
        return last
    return f"stopped by {signal.Signals(-done.returncode).name}; its last words: {last}"


def run_elsewhere(python: str, engine: str, path: Path, work: Work) -> dict[str, Any] | None:
    """One engine in a process of its own; None where it cannot run."""
    command = [python, __file__, "--measure", engine, "--file", str(path), "--threads", str(work.threads)]
    command += ["--long", str(work.long), "--repeats", str(work.repeats)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(work.threads),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    if python != sys.executable:  # another environment: only this repository's own modules
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        print(f"{engine}: {why_it_ended(done)}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Others:
    """How much of the machine other programs, and a hypervisor, have taken since this was made."""

    def __init__(self) -> None:
        self._seconds, self._own, self._began = self._busy(), self._of_children(), time.perf_counter()

    @staticmethod
    def _busy() -> float:
        """Seconds of all cores that were not idle, those stolen from this machine included."""
        user, nice, system, _idle, _waiting, *rest = (
            Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
        )
        return sum(map(int, (user, nice, system, *rest))) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _of_children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def share(self) -> float:
        """The share of all cores' time, from 0 to 1."""
        taken = self._busy() - self._seconds - (self._of_children() - self._own)
        cores = os.cpu_count() or 1
        return round(max(0.0, taken) / (time.perf_counter() - self._began) / cores, 2)


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure."""
    return {
        what: {
            clock: round(statistics.median(r[what][clock] for r in rounds), 3) for clock in rounds[0][what]
        }
        for what in rounds[0]
    }


def main() -> None:
    """Take turns, then print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="a table for each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the default model")
    parser.add_argument("--engines", nargs="+", choices=OURS + PEERS, default=OURS + PEERS)
    parser.add_argument("--long", type=int, default=0, metavar="TOKENS", help="measure such a prompt as well")
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
        print(json.dumps(measure(args.measure, args.file, Work(args.threads[0], args.long, args.repeats))))
        return
    if args.quantize:
        quantize_for_llama(args.file, Path(args.quantize.partition(":")[2]), args.quantize.partition(":")[0])
        return

    from infer.bench.report import revision_of
    from infer.loader.find.default_model import default_model_file

    source = args.model or default_model_file()
    load, others = [round(load, 1) for load in os.getloadavg()], Others()
    facts_of: dict[str, dict[str, Any]] = {}  # of each engine, whatever the threads
    results: dict[int, dict[str, list[dict[str, Any]]]] = {threads: {} for threads in args.threads}
    if args.llama_server is not None and args.http:
        said = subprocess.run([args.llama_server, "--version"], capture_output=True, text=True)
        facts_of["llama-server"] = {"version": (said.stdout + said.stderr).strip()}
    with tempfile.TemporaryDirectory() as directory:
        files = dict.fromkeys(args.engines, source)
        for engine in [engine for engine in files if engine.startswith("llama")]:
            name = engine.split()[1]
            target = files[engine] = Path(directory) / f"{name}.gguf"
            done = subprocess.run(
                [args.peer_python, __file__, "--quantize", f"{name}:{target}", "--file", str(source)],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            )
            if done.returncode != 0:
                print(f"{engine}: {why_it_ended(done)}", file=sys.stderr)
                del files[engine]
        for number in range(1, args.rounds + 1):
            for threads, (engine, path) in itertools.product(args.threads, files.items()):
                python = args.peer_python if engine.startswith("llama") else sys.executable
                is_whole = threads == max(args.threads)  # measures servers and long prompts, too
                work = Work(threads, args.long * is_whole, args.repeats)
                found = run_elsewhere(python, engine, path, work)
                if found is None:
                    continue
                port = _free_port()
                command = server_command(engine, path, threads, port, args.llama_server)
                if args.http and is_whole and command is not None:
                    found["figures"] |= http_figures(command, port)
                results[threads].setdefault(engine, []).append(found.pop("figures"))
                facts_of[engine] = found | {"matrix_bytes": matrix_bytes(engine, path)}
                print(threads, engine, results[threads][engine][-1], flush=True)
            report = {
                "machine": facts() | {"architecture": platform.machine()},
                "model": source.name,
                "revision": revision_of(source),
                "rounds": number,
                "repeats": args.repeats,
                "long": args.long,
                "load": load,
                "others": others.share(),
                "of": facts_of,
                "threads": {str(threads): table(found, facts_of) for threads, found in results.items()},
            }
            write(report, args.out)  # after every round: a run that is stopped has a report of those before
    print(json.dumps(report, indent=2))


def table(
    results: dict[str, list[dict[str, Any]]], facts_of: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The medians of each engine, with what follows from them."""
    medians = {engine: median_of(rounds) for engine, rounds in results.items()}
    for engine, figures in medians.items():
        read = facts_of[engine]["matrix_bytes"] / 1e9
        figures["decode 1"]["gb_per_s"] = round(read * figures["decode 1"]["per_s"], 2)
        for streams in STREAMS:
            if f"http {streams}" in figures:
                figures[f"http {streams}"] |= in_the_loop(figures, streams)
    return medians


if __name__ == "__main__":
    main()

"""The whole table of one GPU in one command: every shape and workload beside its roofline and a peer.

    python -m benchmarks.gpu_table CFG_DIR [CFG_DIR ...] --out-dir benchmarks/reports [--peer FILE ...]

A CFG_DIR holds a `config.json`; weights are random, of that shape (loader/random_weights.py). The measured
ceilings come first: bytes per second of a copy, FLOP per second of a matrix product. A *roofline* is what the
workload takes if every weight and every cached key is read once per step at that speed.

For each shape one JSON file in the shape the peers' results have: {"engine", "model", "nano256": {"s",
"out_tok_s", "in_tok_s"}, ...}, and beside them what the peers do not say: shares of the roofline, the
microseconds of CPU a step takes, the milliseconds to the first token of a cached and of a cold prompt, the
gaps between tokens while long prompts arrive. And what makes a figure worth quoting: the date, the commit,
the versions, the machine, and the version of each peer, from its file or from `--peer-version vllm=1.2.3`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import add_allow_dirty, refuse_dirty, today
from infer.bench.metrics import percentile
from infer.bench.report import commit, machine, versions
from infer.bench.roofline import Ceilings, measure_ceilings, workload_roofline
from infer.bench.target import BenchTarget
from infer.bench.workloads import make_workload
from infer.config.settings import EngineConfig
from infer.engine.engine import Engine
from infer.execution.device import StepResult
from infer.execution.gpu.readback import PendingIds
from infer.loader.random_weights import load_random
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

WORKLOADS = ("b1_256_256", "b8_256_256", "b32_256_256", "b128_256_256", "nano256", "prefill_8x4096")
TEMPERATURE = 0.6


def run(engine: Engine, requests: list[Request]) -> float:
    """Seconds from the first add to the last token."""
    start = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def requests_of(name: str, tag: str) -> list[Request]:
    """A peer workload as requests of fixed length."""
    made = []
    for number, session in enumerate(make_workload(name, seed=42, vocab_size=10_000).sessions):
        (turn,) = session.turns
        params = SamplingParams(
            temperature=TEMPERATURE, max_tokens=turn.max_tokens, ignore_eos=True, seed=number
        )
        made.append(Request(request_id=f"{tag}-{name}-{number}", prompt=tuple(turn.ids), params=params))
    return made


def time_workload(
    engine: Engine, target: BenchTarget, ceilings: Ceilings, name: str, repeats: int
) -> dict[str, Any]:
    """Median of some runs after one that is not counted; nothing is found in the prefix cache."""
    seconds = []
    for repeat in range(repeats + 1):
        engine.reset_prefix_cache()
        torch.cuda.synchronize()
        seconds.append(run(engine, requests_of(name, str(repeat))))
    middle = statistics.median(seconds[1:])
    requests = requests_of(name, "count")
    lengths = [(len(request.prompt), request.params.max_tokens or 0) for request in requests]
    num_in, num_out = sum(length for length, _ in lengths), sum(length for _, length in lengths)
    roofline = workload_roofline(target.shape(), ceilings, lengths)
    return {
        "s": round(middle, 4),
        "out_tok_s": round(num_out / middle, 1),
        "in_tok_s": round(num_in / middle, 1),
        "roofline_s": round(roofline, 4),
        "roofline_share": round(roofline / middle, 3),
        "all_s": [round(value, 4) for value in seconds[1:]],
    }


def cpu_per_step(engine: Engine, num_rows: int) -> float:
    """CPU microseconds of a decode step with this many rows, not counting the wait for the device."""
    for number in range(num_rows):
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=200, ignore_eos=True, seed=number)
        prompt = tuple(random.Random(number).choices(range(10_000), k=64))
        engine.add(Request(request_id=f"cpu-{number}", prompt=prompt, params=params))
    for _ in range(40):
        engine.step()
    waited = 0.0
    wait = PendingIds.wait

    def timed(pending: PendingIds) -> StepResult:
        nonlocal waited
        start = time.perf_counter()
        result = wait(pending)
        waited += time.perf_counter() - start
        return result

    with mock.patch.object(PendingIds, "wait", timed):
        start = time.perf_counter()
        for _ in range(100):
            engine.step()
        total = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return (total - waited) / 100 * 1e6


def first_token(engine: Engine, prompt: tuple[int, ...], name: str) -> float:
    """Seconds to the first token of one request alone."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    return run(engine, [Request(request_id=name, prompt=prompt, params=params)])


def prefix_gain(engine: Engine, length: int = 8192) -> dict[str, float]:
    """TTFT of a prompt that is cached but for its end, against a cold one."""
    length = min(length, engine.context_len - 8)
    rng = random.Random(5)
    prompts = [tuple(rng.choices(range(10_000), k=length)) for _ in range(4)]
    cold = [first_token(engine, prompt, f"cold-{number}") for number, prompt in enumerate(prompts)][1:]
    warm = [first_token(engine, prompt, f"warm-{number}") for number, prompt in enumerate(prompts)][1:]
    cold_s, warm_s = statistics.median(cold), statistics.median(warm)
    return {
        "cold_ms": round(cold_s * 1e3, 2),
        "cached_ms": round(warm_s * 1e3, 2),
        "gain": round(cold_s / warm_s, 1),
    }


def gaps_under_load(engine: Engine, num_streams: int = 32, prompt_len: int = 2048) -> dict[str, float]:
    """Gaps between the tokens of decoding streams while long prompts arrive, one every 200 ms."""
    rng = random.Random(6)

    def request(name: str, length: int, max_tokens: int) -> Request:
        params = SamplingParams(temperature=TEMPERATURE, max_tokens=max_tokens, ignore_eos=True, seed=1)
        return Request(request_id=name, prompt=tuple(rng.choices(range(10_000), k=length)), params=params)

    for number in range(num_streams):
        engine.add(request(f"stream-{number}", 128, 10_000 if engine.context_len > 12_000 else 1500))
    for _ in range(20):
        engine.step()
    gaps: list[float] = []
    last: dict[str, float] = {}
    start = time.perf_counter()
    arrived = 0
    while (now := time.perf_counter()) - start < 4.0:
        if now - start > arrived * 0.2:
            engine.add(request(f"long-{arrived}", prompt_len, 4))
            arrived += 1
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.request_id.startswith("stream"):
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
    for number in range(num_streams):
        engine.abort(f"stream-{number}")
    while engine.has_work:
        engine.step()
    p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
    return {
        "itl_p50_ms": round(p50 * 1e3, 2),
        "itl_p99_ms": round(p99 * 1e3, 2),
        "ratio": round(p99 / p50, 2),
    }


def long_prompts_together(engine: Engine, prefill_rate: float) -> dict[str, float]:
    """64 prompts of 512 to 6,000 tokens at once, 64 to 512 out, beside prompts alone plus decoding alone.

    Decoding alone is the same run again, its prompts found in the prefix cache.
    """
    rng = random.Random(11)
    drawn = [
        (tuple(rng.randint(1, 10_000) for _ in range(rng.randint(512, 6000))), rng.randint(64, 512))
        for _ in range(64)
    ]

    def requests(tag: str) -> list[Request]:
        return [
            Request(
                request_id=f"{tag}-{number}",
                prompt=prompt,
                params=SamplingParams(
                    temperature=TEMPERATURE, max_tokens=max_tokens, ignore_eos=True, seed=number
                ),
            )
            for number, (prompt, max_tokens) in enumerate(drawn)
        ]

    whole, decoding = [], []
    for repeat in range(3):
        engine.reset_prefix_cache()
        whole.append(run(engine, requests(f"mixed-{repeat}")))
        decoding.append(run(engine, requests(f"again-{repeat}")))
    alone = sum(len(prompt) for prompt, _ in drawn) / prefill_rate
    return {
        "s": round(statistics.median(whole), 4),
        "out_tok_s": round(sum(max_tokens for _, max_tokens in drawn) / statistics.median(whole), 1),
        "prompts_alone_s": round(alone, 4),
        "decoding_alone_s": round(statistics.median(decoding), 4),
        "ratio": round(statistics.median(whole) / (alone + statistics.median(decoding)), 3),
    }


def provenance() -> dict[str, Any]:
    """When, of which commit, with what and where."""
    return {
        "created": today(),
        "commit": commit(),
        "command": f"python -m benchmarks.gpu_table {' '.join(Path(word).name for word in sys.argv[1:])}",
        "versions": versions(),
        "machine": machine(),
    }


def read_peers(paths: Sequence[Path], known: Sequence[str]) -> list[dict[str, Any]]:
    """The peers' results; a version that a file does not hold comes from `known`, as NAME=VERSION."""
    named = dict(pair.partition("=")[::2] for pair in known)
    found = []
    for path in paths:
        peer = json.loads(path.read_text(encoding="utf-8"))
        if "version" not in peer and peer["engine"] in named:
            peer = {"engine": peer["engine"], "version": named[peer["engine"]], **peer}
        found.append(peer)
    return found


def measure(directory: Path, quantization: str, args: argparse.Namespace) -> None:
    """Everything about one shape, its weights in one form."""
    start = time.perf_counter()
    loaded = load_random(
        directory,
        dtype="bfloat16",
        device="cuda",
        quantization=quantization,
        max_seq_len=args.max_seq_len,
    )
    target = BenchTarget(loaded=loaded, config=EngineConfig.from_knobs(**args.knobs))
    engine = target.engine()
    first_token(engine, tuple(range(1, 129)), "first")
    startup = time.perf_counter() - start
    start = time.perf_counter()
    while engine.prepare():
        pass
    capture = time.perf_counter() - start
    ceilings = measure_ceilings(torch.device("cuda"), torch.bfloat16)
    found: dict[str, Any] = {
        "engine": "infer",
        "model": directory.name,
        **provenance(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": asdict(ceilings),
        "load_to_first_token_s": round(startup, 2),
        "capture_all_graphs_s": round(capture, 2),
        "knobs": args.knobs,
        "quantization": quantization,
        "peers": [peer for peer in args.peers if peer.get("model") == directory.name],
    }
    print(
        f"{directory.name} {quantization}: first token {startup:.1f} s, graphs {capture:.1f} s, "
        f"ceilings {ceilings}",
        flush=True,
    )
    gc.collect()
    gc.freeze()
    for name in args.workloads:
        found[name] = time_workload(engine, target, ceilings, name, args.repeats)
        row = found[name]
        peers = "  ".join(
            f"{peer['engine']} {peer[name]['out_tok_s']:.0f}/{peer[name]['in_tok_s']:.0f}"
            for peer in found["peers"]
            if name in peer
        )
        print(
            f"{directory.name:14} {quantization:5} {name:15} {row['out_tok_s']:9.0f} out/s "
            f"{row['in_tok_s']:10.0f} in/s {row['roofline_share']:6.1%} of the roofline   {peers}",
            flush=True,
        )
        write(found, args)
    if not args.quick:
        found["cpu_us_per_step"] = {str(n): round(cpu_per_step(engine, n), 1) for n in (1, 64, 256)}
        found["prefix_8k"] = prefix_gain(engine)
        found["mixed_load"] = gaps_under_load(engine)
        others = ["cpu_us_per_step", "prefix_8k", "mixed_load"]
        if "prefill_8x4096" in found:
            found["mixed64"] = long_prompts_together(engine, found["prefill_8x4096"]["in_tok_s"])
            others.append("mixed64")
        print({key: found[key] for key in others}, flush=True)
    write(found, args)


def write(found: dict[str, Any], args: argparse.Namespace) -> None:
    """What is known so far, after every workload: a run that is cut short has not been for nothing."""
    if args.out_dir:
        scheme = "" if found["quantization"] == "none" else f"-{found['quantization']}"
        path = args.out_dir / f"gpu-{found['model']}{scheme}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", type=Path, metavar="CFG_DIR")
    parser.add_argument("--out-dir", type=Path)
    parser.add_argument("--peer", action="append", default=[], type=Path, help="a peer's results file")
    parser.add_argument("--peer-version", action="append", default=[], metavar="NAME=VERSION")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-seq-len", type=int, default=8448)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--quick", action="store_true", help="the workloads alone")
    parser.add_argument(
        "--quantization", nargs="+", default=["none"], metavar="FORM",
        help="none, fp8, int8, int4, as the flag of `infer serve`; several are measured one after the other",
    )  # fmt: skip
    parser.add_argument("--knobs", type=json.loads, default={}, help='JSON, such as {"use_overlap": false}')
    add_allow_dirty(parser)
    args = parser.parse_args()
    if args.out_dir is not None:
        refuse_dirty(parser, args)
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    args.peers = read_peers(args.peer, args.peer_version)
    for directory, quantization in itertools.product(args.configs, args.quantization):
        measure(directory, quantization, args)
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

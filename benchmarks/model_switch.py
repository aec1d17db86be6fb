"""How long a client waits for a model that another one has displaced.

    python -m benchmarks.model_switch MODEL_DIR [--rounds 6] [--out FILE] [-- FLAGS]

A server has two models on demand, MODEL_DIR under two names, and room for one of them. Requests for the two
take turns, so each waits until the other model is gone and its own is there:

    cold     the first request for each model: the weights are read, and a process is started
    asleep   all later ones: the process sleeps, and its weights come back from host memory

For each request: seconds to the first token, to the last one, and the tokens per second of a second request
for the same model, for which nothing is loaded. With FLAGS without `--model-memory` every switch is cold.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import parse, today, write
from benchmarks.serve_rows import MODEL, Load, Server, ask
from infer.bench.report import commit, machine, versions

OTHER = "other"
LOAD = Load(1, 1, 128, 64, 1)
ROOM = "16GiB"  # host memory for weights that sleep


def seconds_of(port: int, model: str, seed: int) -> tuple[float, float]:
    """Return the seconds from a request to its first token and to its last one."""
    answer = asyncio.run(ask(port, LOAD, seed, model))
    if answer.error:
        raise SystemExit(f"{model} did not answer: {answer.error}")
    return answer.times[0] - answer.sent, answer.times[-1] - answer.sent


def switch(port: int, model: str, seed: int) -> dict[str, Any]:
    """Ask a model that is not loaded, and once more when it is."""
    first_s, last_s = seconds_of(port, model, seed)
    again_first_s, again_last_s = seconds_of(port, model, seed + 1)
    return {
        "model": model,
        "first_token_s": round(first_s, 3),
        "last_token_s": round(last_s, 3),
        "loaded_first_token_s": round(again_first_s, 4),
        "loaded_tok_s": round((LOAD.max_tokens - 1) / (again_last_s - again_first_s), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Start, switch, write."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else ["--model-memory", ROOM]
    parser = argparse.ArgumentParser(description="how long a client waits for a model that was displaced")
    parser.add_argument("model", type=Path, help="a checkpoint's directory")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--log", type=Path, default=Path("model-switch.log"), help="where the server's log goes"
    )
    args = parse(parser, arguments[: arguments.index("--")] if "--" in arguments else arguments)
    names = [f"--model={name}={args.model}" for name in (MODEL, OTHER)]
    server = Server([*names, "--on-demand", *flags], args.log)
    found: dict[str, Any] = {
        "engine": "infer", "model": args.model.name, "created": today(), "commit": commit(),
        "versions": versions(), "machine": machine(), "flags": flags, "cold_s": server.first_answer_s,
    }  # fmt: skip
    print(f"{MODEL}: first answer {server.first_answer_s} s after the start of the server")
    try:
        cold, *asleep = (
            switch(server.port, (OTHER, MODEL)[turn % 2], 10 * turn) for turn in range(1 + args.rounds)
        )
    finally:
        server.stop()
    found |= {"cold": cold, "switches": asleep}
    if asleep:
        found["median_first_token_s"] = statistics.median(each["first_token_s"] for each in asleep)
    for each in (cold, *asleep):
        print(each)
    print(f"median to the first token: {found.get('median_first_token_s')} s")
    write(found, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

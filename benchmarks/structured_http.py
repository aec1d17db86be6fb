"""What JSON mode costs clients of a server: streams under a schema beside the same ones without, in turn.

    python -m benchmarks.structured_http [MODEL] [--streams 8] [--tokens 128] [--repeats 5] [--out FILE]
                                         [-- FLAGS]

A server is started, `infer serve MODEL FLAGS`; none: the default model. The answers are those of
`benchmarks.structured`: an array of objects whose `minItems` outlasts the output. All streams are asked for
at once, twice in a row. The cost is 1 - (tokens per second over those without a schema in the same round), in
per cent; the first round is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, parse, write
from benchmarks.serve_rows import MODEL, Load, Server, measure
from benchmarks.structured import PROMPT_LEN, RECORDS
from infer.loader.find.source import resolve_model

STREAMS_PER_CLIENT = 16  # processes that read streams


def compare(port: int, free: Load, num_rounds: int) -> list[dict[str, Any]]:
    """The figures of each round: of answers without a schema, with one, and what that costs."""
    rounds = []
    for number in range(num_rounds):
        found: dict[str, Any] = {}
        loads = ("free", free), ("json", free._replace(schema=RECORDS))
        for place, (name, load) in enumerate(loads):  # prompts that none has had, of the same length
            found[name] = measure(port, load, (2 * number + place) * 10_000_000)
            if found[name]["errors"]:
                raise SystemExit(f"{found[name]['errors']} of {load.num_requests} requests of {name} failed")
        found["cost_percent"] = (1 - found["json"]["out_tok_s"] / found["free"]["out_tok_s"]) * 100
        print(f"round {number}: cost {found['cost_percent']:.1f} %", found["free"], found["json"], flush=True)
        rounds.append(found)
    return rounds


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure, write."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(description="what JSON mode costs clients of a server")
    parser.add_argument("model", nargs="?", help="as for infer serve; none: the default model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--log", type=Path, default=Path("structured-http.log"), help="the server's log")
    args = parse(parser, arguments[: len(arguments) - len(flags) - 1] if flags else arguments)
    num_clients = max(1, args.streams // STREAMS_PER_CLIENT)
    free = Load(2 * args.streams, args.streams, PROMPT_LEN, args.tokens, num_clients, spread=0.0)
    source = resolve_model(args.model)
    server = Server([str(source.path), "--served-model-name", MODEL, *flags], args.log)
    try:
        rounds = compare(server.port, free, args.repeats + 1)[1:]
    finally:
        server.stop()
    cost = statistics.median(found["cost_percent"] for found in rounds)
    print(f"{source.name}, {args.streams} streams of {args.tokens} tokens: JSON costs {cost:.1f} %")
    report = facts() | {"model": source.name, "flags": flags, "streams": args.streams, "tokens": args.tokens}
    write(report | {"cost_percent": cost, "rounds": rounds}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`infer bench`: what a server, an engine or a single idea is worth on this machine.

Each subcommand measures, prints a table, and with `--out FILE` writes a report: FILE as JSON for
`infer bench compare` and for the docs, and beside it the same as Markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from infer.cli import flags
from infer.cli.answer import notice, write_out
from infer.cli.bench_engine import add_engine_benches
from infer.cli.bench_report import WORKLOADS, add_output, finish, new_bench
from infer.cli.readers import above_zero, natural, positive, zero_or_more

EXAMPLES = """\
examples:
  infer bench serve --url http://127.0.0.1:8000 --workload all --seed 42 --wait 60
  infer bench serve --url http://127.0.0.1:8000 --workload w2_mixed:64,chat_serving:mid --repeats 3
  infer bench offline --workload nano256 --model-config llama-3.2-1b/
  infer bench matrix --out matrix.json
  infer bench compare before.json after.json

'infer bench COMMAND --help' shows all options of a command.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand and its own subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure a server, an engine, or what each idea is worth here",
        description="Measure a server, an engine, or what each idea is worth on this machine.",
        usage="infer bench COMMAND [options]",
        epilog=EXAMPLES,
        formatter_class=flags.HelpFormatter,
    )
    parser.set_defaults(run=lambda args: _no_command(parser), log_level="warning", debug=False)
    benches = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_serve(benches)
    add_engine_benches(benches)
    _add_startup(benches)
    _add_policies(benches)
    _add_compare(benches)


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


# -- a server -----------------------------------------------------------------------------------------


def _add_serve(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_bench(
        benches,
        "serve",
        "workloads against any OpenAI-compatible server",
        _serve,
        epilog=WORKLOADS,
        usage="--url URL [options]",
    )
    group = parser.add_argument_group("what to run")
    group.add_argument("--url", required=True, help="http://host:port, https://... or unix:///path/of/socket")
    group.add_argument("--workload", metavar="NAMES", default="all", help="names with commas (default: all)")
    group.add_argument("--model", metavar="NAME", default="", help="default: the first one it serves")
    group.add_argument("--api-key", metavar="KEY", help="bearer token; reports do not hold it")
    group.add_argument(
        "--note", metavar="TEXT", default="", help="for the report: how the server was started, and on what"
    )
    add_output(group, repeats=1)
    group = parser.add_argument_group("how to ask")
    group.add_argument(
        "--wait",
        metavar="S",
        type=zero_or_more,
        default=0.0,
        help="seconds for the server to start (default: 0)",
    )
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        default="ttft=1,tpot=0.1",
        help="what counts as good, in seconds (default: ttft=1,tpot=0.1)",
    )
    group.add_argument(
        "--warmup",
        metavar="N",
        type=natural,
        default=4,
        help="requests before the first that counts (default: 4)",
    )
    group.add_argument(
        "--temperature", metavar="X", type=zero_or_more, default=0.6, help="of every request (default: 0.6)"
    )
    group.add_argument(
        "--vocab-size",
        metavar="N",
        type=positive,
        help="token ids stay below; default: 10000 if it takes those",
    )
    group.add_argument(
        "--text", action="store_true", help="send words; the default for servers that take no token ids"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for outputs of full length; off for servers that refuse the field",
    )
    group.add_argument(
        "--timeout",
        metavar="S",
        type=above_zero,
        default=600.0,
        help="seconds for one request (default: 600)",
    )
    group.add_argument(
        "--processes", metavar="N", type=positive, help="client processes; default: one per 128 streams"
    )
    flags.add_common_flags(parser)


def _serve(args: argparse.Namespace) -> int:
    from infer.bench.load import Endpoint
    from infer.bench.metrics import read_slo
    from infer.bench.serve import Plan, bench_server
    from infer.bench.workloads import read_names

    extra = {"temperature": args.temperature, "seed": args.seed}
    if args.ignore_eos:
        extra["ignore_eos"] = True
    endpoint = Endpoint(
        url=args.url, model=args.model, api_key=args.api_key, timeout_s=args.timeout, extra=extra
    )
    plan = Plan(
        workloads=read_names(args.workload, group="serving"),
        seed=args.seed,
        repeats=args.repeats,
        warmup=args.warmup,
        vocab_size=args.vocab_size,
        as_text=args.text,
        processes=args.processes,
        slo=read_slo(args.slo),
        wait_s=args.wait,
        note=args.note,
    )
    return finish(args, bench_server(endpoint, plan, tell=notice))


# -- no model -----------------------------------------------------------------------------------------


def _add_startup(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_bench(benches, "startup", "fresh processes: imports, help, first token", _startup)
    group = parser.add_argument_group("what to run")
    group.add_argument("--model", metavar="MODEL", help="default: the default model")
    add_output(group, has_seed=False)
    flags.add_common_flags(parser)


def _startup(args: argparse.Namespace) -> int:
    from infer.bench.micro import bench_startup

    return finish(args, bench_startup(model=args.model, repeats=args.repeats, tell=notice))


def _add_policies(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_bench(benches, "policies", "every scheduling policy under two simulated loads", _policies)
    group = parser.add_argument_group("what to run")
    group.add_argument("--num-requests", metavar="N", type=positive, default=200, help="(default: 200)")
    add_output(group, repeats=None)
    flags.add_common_flags(parser)


def _policies(args: argparse.Namespace) -> int:
    from infer.bench.report import make_report
    from infer.bench.simulated import sweep

    rows = sweep(num_requests=args.num_requests, seed=args.seed)
    note = "simulated: the same on every machine; starved: more than 30 s without a token"
    report = make_report(
        "policies", rows, model={}, config={}, seed=args.seed, repeats=1, warmup=0, notes=[note]
    )
    return finish(args, report)


def _add_compare(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = new_bench(
        benches,
        "compare",
        "two reports side by side, with a verdict per figure; exit code 1 if anything got worse, 2 if "
        "they have nothing in common",
        _compare,
        usage="BEFORE AFTER [options]",
    )
    parser.add_argument("before", metavar="BEFORE", type=Path, help="a report, or another engine's results")
    parser.add_argument("after", metavar="AFTER", type=Path)
    parser.add_argument("--all", action="store_true", help="show what did not change as well")
    parser.add_argument(
        "--noise",
        metavar="SHARE",
        type=zero_or_more,
        default=0.02,
        help="least band of noise (default: 0.02)",
    )
    flags.add_common_flags(parser)


def _compare(args: argparse.Namespace) -> int:
    from infer.bench.compare import compare
    from infer.bench.render import comparison_table
    from infer.bench.report import read_report

    found = compare(read_report(args.before), read_report(args.after), least_band=args.noise)
    write_out(comparison_table(found, shows_all=args.all))
    return 1 if found.worse else 0

"""`infer bench`: measure a server or an engine on this machine.

Each subcommand measures, prints a table, and with `--out FILE` writes a report: FILE as JSON for
`infer bench compare` and for the docs, and the same as Markdown next to it. A file that cannot be written is
refused before measuring. Exit code 1: requests or rows failed, or a comparison found something worse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from infer.cli import flags
from infer.cli.answer import notice, write_out
from infer.cli.interrupts import INTERRUPTED, importing
from infer.cli.readers import above_zero, natural, numbers, one_of, positive, rate, zero_or_more
from infer.errors import ConfigError

if TYPE_CHECKING:
    from infer.bench.repeats import EngineBench
    from infer.bench.report import Report

HELP = "measure a server or an engine"
DESCRIPTION = "Measure a server or an engine on this machine."
USAGE = "COMMAND [options]"
EXAMPLES = """\
examples:
  infer bench serve --url http://127.0.0.1:8000 --workload all --seed 42 --wait 60
  infer bench serve --url http://127.0.0.1:8000 --workload w2_mixed:64,chat_serving:mid --repeats 3
  infer bench serve --port 8000 --num-prompts 100 --request-rate 4 --input-len 512 --output-len 64
  infer bench offline --workload nano256 --model-config llama-3.2-1b/
  infer bench compare before.json after.json

'infer bench COMMAND --help' shows all options of a command.
"""

LOCAL_HOST, LOCAL_PORT = "127.0.0.1", 8000
WORKLOADS = """\
workloads: baseline, continuous_batching, paged_attention, chunked_prefill, prefix_caching, w1_single,
w2_mixed (:16, :64), w3_shared_prefix (:16, :64), agent_session and chat_serving (:short, :mid, :long);
and the lists on which other engines are timed: nano256, b1_256_256, b8_256_256, b32_256_256, b128_256_256,
prefill_8x4096. 'all' is the first ten for a server and the last six offline; 'peer' the last six. For a
server there is also random, which has flags of its own.
"""

Flags = dict[str, flags.Row]
BATCHES: Flags = {"--batches NUMBERS": (numbers, "", "1,8,32")}
LENGTHS: Flags = {"--lengths NUMBERS": (numbers, "", "128,512,2048")}
OFFLINE: Flags = {"--workload NAMES": (str, "comma-separated names", "all")}
DECODE: Flags = {"--context N": (positive, "", 512), "--steps N": (positive, "", 64)}
SERVER: Flags = {
    "--url/--base-url URL": (str, "http://host:port, https://... or unix:///path/of/socket"),
    "--host TEXT": (str, f"in place of --url; default: {LOCAL_HOST} where --port is given"),
    "--port N": (natural, f"in place of --url; default: {LOCAL_PORT} where --host is given"),
}
RANDOM_LOAD: Flags = {
    "--num-prompts N": (positive, "requests; default: 1000"),
    "--request-rate X": (rate, "requests per second, as a Poisson process; default: inf, all at once"),
    "--max-concurrency N": (positive, "requests at once, at most; default: no limit"),
    "--input-len/--random-input-len N": (positive, "tokens of each prompt; default: 1024"),
    "--output-len/--random-output-len N": (positive, "tokens of each answer; default: 128"),
    "--dataset-name NAME": (one_of("random"), "random, which is the only one"),
    "--backend NAME": (one_of("openai", "vllm"), "openai or vllm, which mean the same: completions"),
    "--endpoint PATH": (one_of("/v1/completions"), "/v1/completions, which is the only one"),
}
SERVE_WHAT: Flags = {
    "--workload NAMES": (str, "comma-separated names; default: all, or random if its flags are given"),
    "--model NAME": (str, "default: the first model that the server lists", ""),
    "--api-key KEY": (str, "bearer token; not written to reports"),
    "--note TEXT": (str, "a note for the report: how the server was started, on which machine", ""),
}
SERVE_HOW: Flags = {
    "--wait S": (zero_or_more, "seconds for the server to start", 0.0),
    "--slo LIMITS": (str, "latency limits of a good request, in seconds", "ttft=1,tpot=0.1"),
    "--warmup N": (natural, "requests before the first that counts", 4),
    "--temperature X": (zero_or_more, "temperature of every request", 0.6),
    "--num-speculative-tokens N": (
        natural,
        "draft tokens per step and request; 0: none; default: the server's",
    ),
    "--vocab-size N": (positive, "bound of prompts' token ids; default: 10000 if the server takes those"),
    "--timeout S": (above_zero, "seconds for one request", 600.0),
    "--duration S": (above_zero, "soak test of this many seconds: judges errors, memory and p99 latency"),
    "--concurrency N": (positive, "clients of a soak test", 100),
    "--processes N": (positive, "client processes; default: one per 128 streams"),
    "--text": (bool, "send text in place of token ids; the default for servers that take no token ids"),
    "--ignore-eos": (bool, "ask for outputs of full length; off for servers that refuse the field", True),
}

TRACE: Flags = {
    "--model NAME": (str, "default: the first model that the server lists", ""),
    "--api-key KEY": (str, "bearer token"),
    "--wait S": (zero_or_more, "seconds for the server to start", 0.0),
    "--prompt-len N": (positive, "token ids of each prompt", 512),
    "--requests N": (positive, "warm requests after the cold one", 9),
}
SHAPE_HELP = "random weights of the shape in DIR/config.json instead of a model"
TRACE_HELP = "time of each stage of a request, from socket to socket, for a cold and for warm requests"

COMPARE_HELP = (
    "two reports side by side, with a verdict per figure; exit code 1 if anything got worse, 2 if "
    "they have nothing in common"
)
COMPARE: Flags = {
    "before BEFORE": (Path, "a report as --out named it, or another engine's results"),
    "after AFTER": (Path, ""),
    "--all": (bool, "also show figures that did not change"),
    "--noise SHARE": (zero_or_more, "smallest relative change that counts", 0.02),
}
URL: Flags = {"--url URL": (str, "http://host:port, https://... or unix:///path/of/socket", flags.REQUIRED)}
SEED: Flags = {"--seed N": (int, "seed of the prompts", 42)}
OUT: Flags = {"--out FILE": (Path, "write the report: FILE.json and FILE.md")}
ONCE: Flags = {"--repeats N": (positive, "runs of each", 1)}
THRICE: Flags = {"--repeats N": (positive, "runs of each", 3)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the command one subcommand per benchmark, which has the flags."""
    parser.set_defaults(parser=parser, log_level="warning", debug=False)
    benches = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, bench in BENCHES.items():
        description = f"{bench.help[0].upper()}{bench.help[1:]}."
        usage = f"{bench.program} {name} {bench.usage}"
        made = benches.add_parser(
            name, help=bench.help, description=description, usage=usage, epilog=bench.epilog
        )
        made.set_defaults(run=partial(_run_checked, bench.run))
        for title, rows in bench.flags.items():
            flags.add_rows(made.add_argument_group(title) if title else made, rows)
        if bench.has_knobs:
            flags.add_knob_flags(made, without={"seed"})
        flags.add_common_flags(made)


def run(args: argparse.Namespace) -> int:
    """Show the help, because no benchmark was named."""
    args.parser.print_help(sys.stderr)
    return 2


def _run_checked(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    if getattr(args, "out", None) is not None:
        _check_out(_report_path(args.out))
    try:
        return run(args)
    except KeyboardInterrupt:  # an interrupt between rows still gives a report of the complete ones
        notice("interrupted before there was a figure to report")
        raise


# -- a server -----------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from infer.bench.metrics import read_slo
    from infer.bench.serve import Plan, bench_server
    from infer.bench.sse_client import Endpoint
    from infer.bench.workloads import RANDOM, RandomLoad, read_names

    random = {
        field.name: value for field in fields(RandomLoad) if (value := getattr(args, field.name)) is not None
    }
    names = read_names(args.workload or (RANDOM if random else "all"), group="serving")
    if random and (RANDOM not in names or args.duration is not None):
        given = flags.flag(next(iter(random)))
        other = "--duration" if args.duration is not None else f"--workload {args.workload}"
        raise ConfigError(
            f"{given} is for the workload {RANDOM}, and {other} is another load; give one of them"
        )
    extra = {"temperature": args.temperature, "seed": args.seed}
    if args.ignore_eos:
        extra["ignore_eos"] = True
    if args.num_speculative_tokens is not None:
        extra["num_speculative_tokens"] = args.num_speculative_tokens
    endpoint = Endpoint(
        url=_server_url(args), model=args.model, api_key=args.api_key, timeout_s=args.timeout, extra=extra
    )
    plan = Plan(
        workloads=names,
        seed=args.seed,
        repeats=args.repeats,
        warmup=args.warmup,
        vocab_size=args.vocab_size,
        as_text=args.text,
        processes=args.processes,
        slo=read_slo(args.slo),
        wait_s=args.wait,
        note=args.note,
        random=RandomLoad(**random),
    )
    if args.duration is not None:
        from infer.bench.metrics import Slo
        from infer.bench.soak import bench_soak

        if args.slo == SERVE_HOW["--slo LIMITS"][-1]:  # no limit was asked for
            plan = replace(plan, slo=Slo())
        load = {"concurrency": args.concurrency, "duration_s": args.duration}
        report = bench_soak(endpoint, plan, **load, tell=notice)
        return max(finish(args, report), int(report.rows[0].note != "passed"))
    return finish(args, bench_server(endpoint, plan, tell=notice))


def _server_url(args: argparse.Namespace) -> str:
    if args.url is not None:
        if args.host is not None or args.port is not None:
            raise ConfigError("--url names the server already; leave out --host and --port")
        return str(args.url)
    if args.host is None and args.port is None:
        raise ConfigError("which server? give --url http://host:port, or --host and --port")
    host = LOCAL_HOST if args.host is None else args.host
    return f"http://{f'[{host}]' if ':' in host else host}:{LOCAL_PORT if args.port is None else args.port}"


def _trace(args: argparse.Namespace) -> int:
    from infer.bench.sse_client import Endpoint
    from infer.bench.trace import bench_trace

    endpoint = Endpoint(url=args.url, model=args.model, api_key=args.api_key)
    sizes = {"prompt_len": args.prompt_len, "num_warm": args.requests}
    write_out(bench_trace(endpoint, **sizes, seed=args.seed, wait_s=args.wait))
    return 0


# -- an engine ----------------------------------------------------------------------------------------


def _bench_engine(name: str, args: argparse.Namespace) -> int:
    bench = open_bench(args)
    from infer.bench import offline
    from infer.bench.workloads import read_names

    if name == "offline":
        report = offline.bench_offline(bench, read_names(args.workload, group="offline"))
    elif name == "latency":
        report = offline.bench_latency(bench)
    elif name == "prefill":
        report = offline.bench_prefill(bench, lengths=args.lengths)
    else:
        sizes = {"context": args.context, "num_steps": args.steps}
        report = offline.bench_decode(bench, batches=args.batches, **sizes)
    return finish(args, report)


def open_bench(args: argparse.Namespace) -> EngineBench:
    """Load the model that the flags name, and get ready to measure it."""
    knobs = flags.knobs_from(args)
    given = {"--model": knobs.get("model"), "--model-config": args.model_config, "--tiny": args.tiny or None}
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{named[0]} and {named[1]} both name a model; give one of them")
    with importing():
        from infer.bench.repeats import EngineBench
        from infer.bench.target import open_target

    is_tiny = args.tiny or (args.tiny is None and not named)
    target = open_target(knobs, model_config=args.model_config, is_tiny=is_tiny)
    return EngineBench(target=target, seed=args.seed, repeats=getattr(args, "repeats", 1), tell=notice)


# -- reports ----------------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from infer.bench.compare import compare
    from infer.bench.render import comparison_table
    from infer.bench.report import read_report

    reports = [path if path.exists() else _report_path(path) for path in (args.before, args.after)]
    found = compare(*map(read_report, reports), least_band=args.noise)
    write_out(comparison_table(found, shows_all=args.all))
    return 1 if found.worse else 0


def finish(args: argparse.Namespace, report: Report) -> int:
    """Print the tables, write the report where it was asked for, and return the exit code."""
    from infer.bench.render import json_lines, terminal, to_markdown
    from infer.bench.report import write_report

    write_out(json_lines(report) if getattr(args, "json", False) else terminal(report))
    if args.out is not None:
        path = _report_path(args.out)
        write_report(report, path)
        path.with_suffix(".md").write_text(to_markdown(report), encoding="utf-8")
        notice(f"wrote {path} and {path.with_suffix('.md').name}")
    has_errors = any(row.figures["num_errors"].high for row in report.rows if "num_errors" in row.figures)
    has_errors |= any(row.skipped.startswith("failed") for row in report.rows)
    return INTERRUPTED if report.is_partial else 1 if has_errors else 0


def _check_out(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write the report {path}: {error.strerror}") from None


def _report_path(out: Path) -> Path:
    return out if out.suffix == ".json" else out.with_name(out.name + ".json")


# -- all of them --------------------------------------------------------------------------------------


class Bench(NamedTuple):
    """A benchmark as a command."""

    help: str
    run: Callable[[argparse.Namespace], int]
    flags: Mapping[str, Flags]  # flags by the title of their group; "": none
    usage: str = "[options]"
    epilog: str = ""
    has_knobs: bool = False  # True if it runs an engine here
    program: str = "infer bench"


def model_flags(*, is_tiny: bool = False) -> Flags:
    """The flags that name the model of an engine here, besides knobs."""
    tiny = "random weights of a tiny model" + ("; the default here, --no-tiny: the default model" * is_tiny)
    unless_given = None if is_tiny else False  # None: yes, unless another flag names a model
    return {"--model-config DIR": (Path, SHAPE_HELP), "--tiny": (bool, tiny, unless_given)}


def _of_engine(name: str) -> Bench:
    """A benchmark of an engine here, without a server."""
    text, rows = ENGINE[name]
    epilog = WORKLOADS if name == "offline" else ""
    what = {WHAT: model_flags() | rows}
    return Bench(text, partial(_bench_engine, name), what, epilog=epilog, has_knobs=True)


WHAT = "what to run"
TO_SERVER = "--url URL [options]"
REPORTED = SEED | THRICE | OUT
ENGINE: Mapping[str, tuple[str, Flags]] = {
    "offline": ("throughput of whole workloads, and the machine's roofline", OFFLINE | REPORTED),
    "latency": ("one request at a time: first token, each token, total", REPORTED),
    "prefill": ("prompts only: tokens per second and share of the matmul rate", LENGTHS | REPORTED),
    "decode": ("decoding only: step time at several batch sizes", BATCHES | DECODE | REPORTED),
}
BENCHES: dict[str, Bench] = {  # benchmarks/bench.py has more
    "serve": Bench(
        "workloads against any OpenAI-compatible server",
        _serve,
        {
            WHAT: SERVER | SERVE_WHAT | SEED | ONCE | OUT,
            "the workload 'random', as 'vllm bench serve' describes it": RANDOM_LOAD,
            "how to ask": SERVE_HOW,
        },
        TO_SERVER,
        WORKLOADS,
    ),
    **{name: _of_engine(name) for name in ENGINE},
    "trace": Bench(TRACE_HELP, _trace, {WHAT: URL | TRACE | SEED}, TO_SERVER),
    "compare": Bench(COMPARE_HELP, _compare, {"": COMPARE}, "BEFORE AFTER [options]"),
}

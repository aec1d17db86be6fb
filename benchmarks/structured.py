"""What JSON mode costs, and what it saves: constrained requests beside the same ones without a constraint.

    python -m benchmarks.structured [MODEL] [--rows 32] [--tokens 256] [--repeats 5] [--out FILE]
    python -m benchmarks.structured CFG_DIR --random --tokenizer DIR --device cuda ...
    python -m benchmarks.structured [MODEL] --write-tokenizer DIR

MODEL is a checkpoint or a GGUF file; none: the default model. With `--random`, a directory with a
`config.json`: weights are random, of that shape, and `--tokenizer` names a directory with a `tokenizer.json`
of a real vocabulary, which may be smaller than the model's: ids without a token are never allowed.
`--write-tokenizer` writes that file from a model that has one, to be taken to a machine without it.

    free      no constraint
    json      an array of objects whose `minItems` outlasts the output
    masks     the same, with every token sampled: no ids are appended because nothing else could follow
    words     the same, with texts of at most 16 characters, whose masks take several times as long
    keys      an array of objects with long keys and short values, of which most characters are forced

Runs alternate. The cost is 1 - (tokens per second over those of `free` in the same round), in per cent; the
cost of a step is its time over that of `free`, less 1. Then the times of one step's work on the host: all
masks of a step in which every row has one, one consumed id, and the compilation of ordinary schemas. At last
where a step of `json` spends its time on the host, in microseconds, in the order of the step (engine.py); of
`wait` it works on nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from tokenizers import Tokenizer

from benchmarks.machine import parse
from infer.bench.metrics import percentile
from infer.bench.report import Row, make_report, make_row, write_report
from infer.bench.target import BenchTarget, open_target
from infer.constraints.compiler import Compiler
from infer.constraints.description import Structured
from infer.constraints.masks import MaskFiller
from infer.constraints.token_bytes import TokenBytes, tokenizer_json
from infer.engine.engine import Engine
from infer.engine.guided import GuidedRequests
from infer.engine.host_half import HostHalf
from infer.execution.device import PendingStep
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request
from infer.scheduling.scheduler import Scheduler

PROMPT_LEN = 128
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "</s>")  # of an answer, in vocabularies
LONG = 10_000  # items: more than any output here has
TEXT = {"type": "string"}
WORD = {"type": "string", "maxLength": 16}


def array_of(properties: dict[str, Any]) -> str:
    """The schema of an array of such objects that does not end."""
    item = {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip
    return json.dumps({"type": "array", "items": item, "minItems": LONG})


def records(text: dict[str, Any]) -> str:
    """Of every kind of value, some of them texts."""
    return array_of(
        {
            "id": {"type": "integer"},
            "kind": {"enum": ["small", "large", "unknown"]},
            "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
            "done": {"type": "boolean"},
            "name": text,
        }
    )


RECORDS = records(TEXT)
KEYS = array_of(
    {
        f"{subject}_{fact}": {"type": "boolean"}
        for subject in ("customer_account", "shipping_address", "payment_method")
        for fact in ("is_verified", "was_changed_this_year", "requires_confirmation")
    }
)
ORDINARY = [  # as applications send them
    RECORDS,
    KEYS,
    {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            },
            "final_answer": {"type": "string"},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "location": {"type": "string", "pattern": "^[A-Za-z ,.'-]{2,60}$"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "at": {"type": "string", "format": "date-time"},
        },
        "required": ["location"],
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "anyOf": [
            {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]},
            {"type": "object", "properties": {"result": {"type": "number"}}, "required": ["result"]},
        ]
    },
]
TARGETS = {"json_cost_percent": 5.0, "fill_p99_ms": 0.8, "compile_max_ms": 10.0}


class Variant(NamedTuple):
    """How requests are constrained."""

    structured: Structured | None
    jumps: bool = True


VARIANTS = {
    "free": Variant(None),
    "json": Variant(Structured(kind="json_schema", text=RECORDS)),
    "masks": Variant(Structured(kind="json_schema", text=RECORDS), jumps=False),
    "words": Variant(Structured(kind="json_schema", text=records(WORD)), jumps=False),
    "keys": Variant(Structured(kind="json_schema", text=KEYS)),
}


ABOUT = {
    "free": "no constraint",
    "json": "an array of objects that outlasts the output",
    "masks": "the same, every token sampled",
    "words": "the same, with texts of at most 16 characters",
    "keys": "long keys and short values",
}


class Run(NamedTuple):
    """One batch, from the first request to the last token."""

    seconds: float
    num_steps: int
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return sum(map(len, self.outputs)) / self.seconds


def run(engine: Engine, variant: Variant, num_rows: int, num_tokens: int, vocab_size: int) -> Run:
    """Serve a batch of requests with prompts that no other run has had."""
    rng = np.random.default_rng(7)
    engine.reset_prefix_cache()
    engine._guided.jumps = variant.jumps
    for number in range(num_rows):
        params = SamplingParams(
            temperature=0.6, seed=number, max_tokens=num_tokens, structured=variant.structured,
            ignore_eos=variant.structured is None,
        )  # fmt: skip
        prompt = tuple(rng.integers(10, min(vocab_size, 10_000), PROMPT_LEN).tolist())
        engine.add(Request(request_id=str(number), prompt=prompt, params=params))
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    start, first = time.perf_counter(), engine.scheduler.step
    while engine.has_work:
        for output in engine.step():
            outputs[int(output.request_id)] += output.token_ids
            if output.finish_reason not in (None, "length"):
                raise RuntimeError(f"a request ended with {output.finish_reason}: {output.error}")
    return Run(time.perf_counter() - start, engine.scheduler.step - first, outputs)


def compare(
    engine: Engine, tokenizer: Tokenizer, args: argparse.Namespace
) -> tuple[dict[str, list[dict[str, float]]], dict[str, float]]:
    """The figures of each variant in all rounds but the first, and the times of the host's work."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    whole: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(args.repeats + 1):
        for name, variant in VARIANTS.items():
            with timed(MaskFiller, "fill") as fills:
                made = run(engine, variant, args.rows, args.tokens, tokenizer.get_vocab_size())
            whole[name] += [seconds for seconds, (guides, _) in fills if len(guides) == args.rows]
            figures = {
                "output_tokens_per_s": made.tokens_per_s,
                "step_ms": made.seconds / made.num_steps * 1e3,
                "chars_per_s": num_chars(tokenizer, made.outputs) / made.seconds,
            }
            free = found["free"][-1] if name != "free" else figures
            figures["token_cost_percent"] = (1 - made.tokens_per_s / free["output_tokens_per_s"]) * 100
            figures["step_cost_percent"] = (figures["step_ms"] / free["step_ms"] - 1) * 100
            figures["chars_ratio"] = figures["chars_per_s"] / free["chars_per_s"]
            found[name].append(figures)
            if not number:
                sample = tokenizer.decode(made.outputs[0], skip_special_tokens=False)
                print(f"{name:6} {sample[:90]!r}", flush=True)
    times: dict[str, float] = {}
    for name, prefix in (("masks", "fill"), ("words", "fill_words")):
        for percent in (50, 99):
            times[f"{prefix}_p{percent}_ms"] = percentile(whole[name], percent) * 1e3
    return {name: rounds[1:] for name, rounds in found.items()}, times


@contextmanager
def timed(owner: type, name: str) -> Iterator[list[tuple[float, tuple[Any, ...]]]]:
    """The seconds and arguments of every call of a method."""
    calls: list[tuple[float, tuple[Any, ...]]] = []
    method = getattr(owner, name)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = method(self, *given, **named)
        calls.append((time.perf_counter() - start, given))
        return result

    with mock.patch.object(owner, name, call):
        yield calls


def where_time_goes(engine: Engine, args: argparse.Namespace, vocab_size: int) -> dict[str, float]:
    """The microseconds that the parts of a step of `json` take, on average; what is left of it is `rest`."""
    parts: dict[str, list[tuple[type, str]]] = {
        "step": [(Engine, "step")],
        "plan": [(Scheduler, "plan"), (Scheduler, "advance")],
        "order": [(HostHalf, "order")],
        "begin": [(type(engine._device), "run")],
        "wait": [(Engine, "_read")],
        "consume": [(GuidedRequests, "_show")],
        "fill": [(MaskFiller, "fill")],
        "sample": [(PendingStep, "sample")],
        "report": [(Engine, "_conclude")],
        "jump": [(GuidedRequests, each) for each in ("may_jump", "jump")],
    }
    with ExitStack() as stack:
        calls = {
            name: [stack.enter_context(timed(owner, method)) for owner, method in methods]
            for name, methods in parts.items()
        }
        made = run(engine, VARIANTS["json"], args.rows, args.tokens, vocab_size)
    found = {
        name: sum(seconds for times in lists for seconds, _ in times) / made.num_steps * 1e6
        for name, lists in calls.items()
    }
    step_us = found.pop("step")
    return {"consume_mean_us": found["consume"] / args.rows} | {
        f"host_{name}_us": us for name, us in (found | {"rest": step_us - sum(found.values())}).items()
    }


def num_chars(tokenizer: Tokenizer, outputs: list[list[int]]) -> int:
    """The characters of all outputs; an id without a token has none."""
    return sum(map(len, tokenizer.decode_batch(outputs, skip_special_tokens=False)))


def compile_times(token_bytes: TokenBytes) -> dict[str, float]:
    """Milliseconds to compile each ordinary schema, nothing of it being known."""
    token_bytes.tokenizer()
    seconds = []
    for schema in ORDINARY:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        start = time.perf_counter()
        Compiler(token_bytes).compile(Structured(kind="json_schema", text=text)).lexer.matcher()
        seconds.append(time.perf_counter() - start)
    return {"compile_p50_ms": percentile(seconds, 50) * 1e3, "compile_max_ms": max(seconds) * 1e3}


def open_random(args: argparse.Namespace) -> BenchTarget:
    """Random weights of a shape, whose answers end at a token of the tokenizer that was given."""
    knobs: dict[str, Any] = {"dtype": args.dtype or "bfloat16", "tokenizer": str(args.tokenizer)}
    knobs |= {"device": args.device} if args.device else {}
    target = open_target(
        knobs | {"max_seq_len": PROMPT_LEN + args.tokens + 64, **args.knobs}, model_config=Path(args.model)
    )
    vocab = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")).get_vocab()
    end = next((vocab[end] for end in ENDS if end in vocab), max(vocab.values()))
    return replace(target, loaded=replace(target.loaded, eos_ids=(end,)))


def open_real(args: argparse.Namespace) -> BenchTarget:
    """A model that is there, with its own tokenizer."""
    knobs: dict[str, Any] = {"model": args.model} if args.model else {}
    knobs |= {"device": args.device} if args.device else {}
    return open_target(knobs | ({"dtype": args.dtype} if args.dtype else {}) | args.knobs)


def tokenizer_of(target: BenchTarget, args: argparse.Namespace) -> str:
    """The tokenizer's JSON."""
    if args.tokenizer is not None:
        return tokenizer_json(args.tokenizer, None)
    from infer.loader.text_headers import read_text_headers

    source = target.loaded.source
    assert source is not None, "random weights have no tokenizer: --tokenizer"
    return tokenizer_json(source.path, read_text_headers(source).gguf_metadata)


def show(name: str, rows: Sequence[Row]) -> None:
    """A line for each variant."""
    print(f"\n{name}\n{'':8}{'tok/s':>10}{'step ms':>10}{'chars/s':>10}{'cost':>9}{'of step':>9}{'chars':>9}")
    for row in rows:
        middle = {name: figure.median for name, figure in row.figures.items()}
        speeds = (
            f"{middle['output_tokens_per_s']:10.0f}{middle['step_ms']:10.3f}{middle['chars_per_s']:10.0f}"
        )
        costs = f"{middle['token_cost_percent']:7.2f} %{middle['step_cost_percent']:7.2f} %"
        print(f"{row.name:8}{speeds}{costs}{middle['chars_ratio']:7.2f} x")


def main() -> int:
    """Measure, print, write; exits with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--random", action="store_true", help="random weights of MODEL's config.json")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR")
    parser.add_argument("--write-tokenizer", type=Path, metavar="DIR")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--knobs", type=json.loads, default={}, help='JSON, such as {"use_overlap": false}')
    parser.add_argument("--target-percent", type=float, default=TARGETS["json_cost_percent"])
    args = parse(parser)
    if args.random and (args.tokenizer is None or args.model is None):
        parser.error("--random needs MODEL, a directory with a config.json, and a --tokenizer")
    args.knobs = {"max_batch_size": args.rows} | args.knobs
    target = open_random(args) if args.random else open_real(args)
    text = tokenizer_of(target, args)
    if args.write_tokenizer is not None:
        args.write_tokenizer.mkdir(parents=True, exist_ok=True)
        (args.write_tokenizer / "tokenizer.json").write_text(text, encoding="utf-8")
        return 0
    return measure(target, text, args)


def measure(target: BenchTarget, text: str, args: argparse.Namespace) -> int:
    """All rows of the report."""
    engine = target.engine()
    while engine.prepare():
        pass
    token_bytes = TokenBytes(
        lambda: text, vocab_size=target.vocab_size, eos_ids=target.loaded.eos_ids
    )  # one of its own, to time it
    start = time.perf_counter()
    token_bytes.prepare()
    host = {"vocabulary_s": time.perf_counter() - start} | compile_times(token_bytes)
    found, times = compare(engine, Tokenizer.from_str(text), args)
    host |= times | where_time_goes(engine, args, Tokenizer.from_str(text).get_vocab_size())
    settings = {"rows": args.rows, "prompt_len": PROMPT_LEN, "tokens": args.tokens}
    rows = [make_row(name, ABOUT[name], rounds, settings=settings) for name, rounds in found.items()]
    show(f"{target.loaded.name}, {args.rows} rows on {target.device}", rows)
    print("  ".join(f"{name} {value:.3f}" for name, value in host.items()))
    reached = host | {"json_cost_percent": rows[1].figures["token_cost_percent"].median}
    rows.append(make_row("host", "work of the host", [host] * args.repeats, settings={"rows": args.rows}))
    if args.out is not None:
        report = make_report(
            "structured", rows, model=target.facts(), config=target.knobs(), seed=7, repeats=args.repeats,
            warmup=1,
        )  # fmt: skip
        write_report(report, args.out)
    limits = TARGETS | {"json_cost_percent": args.target_percent}
    missed = {name: value for name, value in reached.items() if value > limits.get(name, value)}
    for name, value in missed.items():
        print(f"missed: {name} is {value:.2f}, wanted {limits[name]}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

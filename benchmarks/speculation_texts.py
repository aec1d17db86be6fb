"""Speculative decoding on real weights and texts: tokens per second, with and without drafts.

    python -m benchmarks.speculation_texts --out benchmarks/reports/speculation-cpu.json
    python -m benchmarks.speculation_texts --device cuda --methods off eagle3 --head HEAD --batches 1 8

Four kinds of prompts: code that is to be repeated with one name changed, a text that is to be repeated in
parts, questions that are answered greedily, where a small model soon repeats itself, and the same questions
answered at temperature 1, which hardly does. One stream at a time, or a batch of them, for which prompts come
again with a number. The engines have the same weights and take turns, batch by batch; a ratio is the median
over rounds of the time without drafts by the time with. `cpu_ratio` is the same of CPU time, which other
programs on the machine change less, and `decode_ratio` of the time after the first token, on a CPU of CPU
time: prompts are computed once more for their first tokens alone. `accepted_len` are the tokens of a step
with drafts, on average. On a CPU answers must be equal; on a GPU, whose kernels add up in another order for
another number of rows, `same_answers` says how many are.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, parse, write
from infer import LLM, SamplingParams
from infer.cache import layout
from infer.execution.gpu.device import GpuDevice
from infer.scheduling import preemption
from infer.speculative import adaptive, ngram

METHODS: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculative_method": "ngram"},
    "suffix": {
        "speculative_method": "suffix",
        "suffix_max_answers": 0,
    },  # prompts come again: no answers kept
}


SAMPLED = "sampled answers"


def prompts() -> dict[str, list[str]]:
    """Prompts by kind."""
    sources: list[Any] = [
        ngram.repeat_from,
        preemption.PreemptionCost,
        layout.Transfer,
        adaptive.Acceptance.update,
    ]
    code = [textwrap.dedent(inspect.getsource(source)) for source in sources]
    notes = [str(inspect.getdoc(module)) for module in (preemption, ngram)]
    questions = [
        "Tell me a story about a fox who learns to read.",
        "Why is the sky blue? Explain it to a child.",
        "Write a letter to a friend about a journey to the mountains.",
        "What should I cook with rice, eggs and spinach?",
    ]
    return {
        "edits of code": [
            f"Repeat this code exactly, but rename the first name to `renamed`:\n```python\n{text}```"
            for text in code
        ],
        "summaries that repeat": [
            f"List the main sentences of this text, word for word:\n\n{text}" for text in notes
        ],
        "free answers": questions,
        SAMPLED: questions,
    }


def batches_of(texts: list[str], size: int) -> list[list[str]]:
    """Every text at least once, in batches of this size; one that comes again has a number before it."""
    found = [
        text if turn == 0 else f"{turn + 1}. {text}"
        for turn, text in itertools.product(range(-(-size // len(texts))), texts)
    ]
    return [found[first : first + size] for first in range(0, len(found) - size + 1, size)]


def measure(
    engines: dict[str, LLM], kind: str, batches: list[list[str]], rounds: int, max_tokens: int
) -> dict[str, Any]:
    """The speed of each method on some prompts, and its ratio to no drafts."""
    is_exact = not any(isinstance(llm.engine.device, GpuDevice) for llm in engines.values())
    read_clock = time.process_time if is_exact else time.perf_counter
    # tokens per second by the clock, of CPU time, and after the first token
    speeds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    params = SamplingParams(temperature=float(kind == SAMPLED), seed=1, max_tokens=max_tokens)
    num_same, before = dict.fromkeys(engines, 0), {name: windows_of(llm) for name, llm in engines.items()}
    num_tokens = 0
    for turn in range(rounds + 1):  # the first is not counted
        spent = {name: [0, 0.0, 0.0, 0.0] for name in engines}  # tokens, clock, CPU, after the first token
        for texts in batches:
            answers = {}
            for name, llm in engines.items():
                llm.engine.reset_prefix_cache()
                messages = [[{"role": "user", "content": text}] for text in texts]
                first_start = read_clock()
                llm.chat(messages, replace(params, max_tokens=1))
                llm.engine.reset_prefix_cache()
                start, cpu_start, all_start = time.perf_counter(), time.process_time(), read_clock()
                made = llm.chat(messages, params)
                spent[name][1] += time.perf_counter() - start
                spent[name][2] += time.process_time() - cpu_start
                spent[name][3] += read_clock() - all_start - (all_start - first_start)
                spent[name][0] += sum(len(answer.token_ids) for answer in made)
                answers[name] = [answer.outputs[0].text for answer in made]
            for name, found in answers.items():
                same = [mine == base for mine, base in zip(found, answers["off"], strict=True)]
                num_same[name] += sum(same) * bool(turn)
                assert all(same) or not is_exact, f"drafts have changed an answer to {texts}"
        num_tokens = int(spent["off"][0])
        if turn:
            for name, (tokens, clock_s, cpu_s, after_s) in spent.items():
                num_after = tokens - sum(map(len, batches))
                speeds[name].append((tokens / clock_s, tokens / cpu_s, num_after / after_s))
    rows: dict[str, Any] = {}
    for name, rates in speeds.items():
        ratios, cpu_ratios, decode_ratios = (
            [mine[clock] / base[clock] for base, mine in zip(speeds["off"], rates, strict=True)]
            for clock in range(3)
        )
        windows, kept = (
            now - then for now, then in zip(windows_of(engines[name]), before[name], strict=True)
        )
        rows[name] = {
            "out_tok_s": round(statistics.median(rate for rate, *_ in rates), 1),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "largest": round(max(ratios), 3),
            "cpu_ratio": round(statistics.median(cpu_ratios), 3),
            "decode_ratio": round(statistics.median(decode_ratios), 3),
            "windows": windows,
            "accepted_len": round(1 + kept / windows, 3) if windows else 1.0,
            "same_answers": num_same[name] / (rounds * sum(map(len, batches))),
        }
        print(f"  {kind:24} batch {len(batches[0]):2} {name:8} {rows[name]}", flush=True)
    return {"num_tokens": num_tokens, **rows}


def windows_of(llm: LLM) -> tuple[int, int]:
    """How many windows an engine has judged, and how many drafts it has kept."""
    speculation = llm.engine.speculation
    return (
        (0, 0) if speculation is None else (speculation.totals.num_windows, speculation.totals.num_accepted)
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory, GGUF file or hub id; default: the default model")
    parser.add_argument("--head", help="directory of an EAGLE-3 head for the model, to be measured as well")
    parser.add_argument(
        "--methods", nargs="+", help="some of off, ngram, suffix and eagle3; off is always one"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="streams at a time")
    parser.add_argument("--device", default="auto", help="as of an engine")
    parser.add_argument("--knobs", type=json.loads, default={}, help="JSON of knobs for engines with drafts")
    parser.add_argument("--num-threads", type=int, help="of a CPU; 1: none of the CPU time is waiting")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=192)
    args = parse(parser)
    methods = dict(METHODS)
    if args.head is not None:
        methods["eagle3"] = {"speculative_method": "eagle3", "draft_model": args.head}
    if unknown := set(args.methods or ()) - methods.keys():
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(methods)}; eagle3 needs --head")
    chosen = {name: knobs for name, knobs in methods.items() if name in {"off", *(args.methods or methods)}}
    shared: dict[str, Any] = {"device": args.device, "max_seq_len": 2048, "num_blocks": 2048}
    if args.num_threads is not None:
        shared["num_threads"] = args.num_threads
    engines = {
        name: LLM(args.model, **shared, **(knobs and knobs | args.knobs)) for name, knobs in chosen.items()
    }
    for llm in engines.values():  # steps are timed again, as in a server that has been idle for minutes
        while llm.engine.prepare() or llm.engine.use_idle_time() is not None:
            pass
    report: dict[str, Any] = {"model": engines["off"].name, **facts(), "rounds": args.rounds, "kinds": {}}
    if args.num_threads is not None:
        report["num_threads"] = args.num_threads
    for (kind, texts), size in itertools.product(prompts().items(), args.batches):
        name = kind if args.batches == [1] else f"{kind}, batch {size}"
        found = measure(engines, kind, batches_of(texts, size), args.rounds, args.max_tokens)
        report["kinds"][name] = found
    write(report, args.out)
    print(json.dumps(report["kinds"]) if args.out is None else f"written to {Path(args.out)}")


if __name__ == "__main__":
    main()

"""Speculative decoding on real weights and texts: tokens per second of one stream, with and without drafts.

    python -m benchmarks.speculation_texts --out benchmarks/reports/speculation-cpu.json

Four kinds of prompts: code that is to be repeated with one name changed, a text that is to be repeated in
parts, questions that are answered greedily, where a small model soon repeats itself, and the same questions
answered at temperature 1, which hardly does. The engines have the same weights and take turns, prompt by
prompt; a ratio is the median over rounds of the time without drafts by the time with. `cpu_ratio` is the same
of CPU time, which other programs on the machine change less. Answers must be equal.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import textwrap
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import facts, parse, write
from infer import LLM, SamplingParams
from infer.scheduling import plan, preemption
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
        plan.Transfer,
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


def measure(
    engines: dict[str, LLM], kind: str, texts: list[str], rounds: int, max_tokens: int
) -> dict[str, Any]:
    """The speed of each method on some prompts, and its ratio to no drafts."""
    # seconds by the clock, and of CPU time
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    params = SamplingParams(temperature=float(kind == SAMPLED), seed=1, max_tokens=max_tokens)
    num_tokens = 0
    for turn in range(rounds + 1):  # the first is not counted
        spent = dict.fromkeys(engines, (0.0, 0.0))
        num_tokens = 0
        for text in texts:
            answers = {}
            for name, llm in engines.items():
                llm.engine.reset_prefix_cache()
                start, cpu_start = time.perf_counter(), time.process_time()
                answer = llm.chat([{"role": "user", "content": text}], params)[0].outputs[0]
                took, cpu_took = time.perf_counter() - start, time.process_time() - cpu_start
                spent[name] = spent[name][0] + took, spent[name][1] + cpu_took
                answers[name] = answer.text
            num_tokens += len(answer.token_ids)
            assert len(set(answers.values())) == 1, f"drafts have changed the answer to {text[:60]!r}"
        if turn:
            for name, value in spent.items():
                seconds[name].append(value)
    rows: dict[str, Any] = {}
    for name, found in seconds.items():
        ratios, cpu_ratios = (
            [base[clock] / mine[clock] for base, mine in zip(seconds["off"], found, strict=True)]
            for clock in (0, 1)
        )
        rows[name] = {
            "out_tok_s": round(num_tokens / statistics.median(took for took, _ in found), 1),
            "ratio": round(statistics.median(ratios), 3),
            "least": round(min(ratios), 3),
            "largest": round(max(ratios), 3),
            "cpu_ratio": round(statistics.median(cpu_ratios), 3),
        }
        print(f"  {kind:24} {name:8} {rows[name]}", flush=True)
    return {"num_tokens": num_tokens, **rows}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="directory, GGUF file or hub id; default: the default model")
    parser.add_argument("--head", help="directory of an EAGLE-3 head for the model, to be measured as well")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=192)
    args = parse(parser)
    methods = dict(METHODS)
    if args.head is not None:
        methods["eagle3"] = {"speculative_method": "eagle3", "draft_model": args.head}
    engines = {
        name: LLM(args.model, max_seq_len=2048, num_blocks=512, **knobs) for name, knobs in methods.items()
    }
    for llm in engines.values():  # steps are timed again, as in a server that is idle for a moment
        while llm.engine.use_idle_time() == 0:
            pass
    report: dict[str, Any] = {"model": engines["off"].name, **facts(), "rounds": args.rounds, "kinds": {}}
    for kind, texts in prompts().items():
        report["kinds"][kind] = measure(engines, kind, texts, args.rounds, args.max_tokens)
    write(report, args.out)
    print(json.dumps(report["kinds"]) if args.out is None else f"written to {Path(args.out)}")


if __name__ == "__main__":
    main()

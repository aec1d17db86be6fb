"""What a form of the weights costs in accuracy: perplexity on a text, and the share of equal guesses.

    python -m benchmarks.perplexity TEXT.txt [--model MODEL] [--weights fp32 int8 int4] [--windows 16]

The text is cut into windows of `--window-len` tokens, and every token but the first of a window is predicted
from those before it. The first form named is what the others are compared with. The uncertainty is that of
the mean difference in log-probability between the two, token by token: both see the same text, so it is far
smaller than that of the perplexity itself.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import facts, parse, write
from infer import LLM, SamplingParams
from infer.bench.report import revision_of
from infer.loader.find.source import resolve_model


class Guesses(NamedTuple):
    """Of every predicted token: its log-probability, and the token that was likeliest."""

    logprobs: list[float]
    best_ids: list[int]

    @property
    def perplexity(self) -> float:
        """E to the mean surprise."""
        return math.exp(-statistics.fmean(self.logprobs))


def cut(ids: list[int], num_windows: int, window_len: int) -> list[list[int]]:
    """The first whole windows of a text."""
    windows = [ids[i : i + window_len] for i in range(0, len(ids) - window_len + 1, window_len)]
    if not windows:
        sys.exit(f"the text has {len(ids)} tokens, which is less than a window of {window_len}")
    return windows[:num_windows]


def guess(llm: LLM, windows: list[list[int]]) -> Guesses:
    """What a model makes of the windows."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    rows = [row for answer in llm.generate(windows, params) for row in answer.prompt_logprobs or () if row]
    return Guesses([row.logprob for row in rows], [row.top[0][0] for row in rows])


def compare(guesses: Guesses, base: Guesses) -> dict[str, float]:
    """The row of the table."""
    worse = [b - a for a, b in zip(guesses.logprobs, base.logprobs, strict=True)]
    same = sum(a == b for a, b in zip(guesses.best_ids, base.best_ids, strict=True))
    return {
        "perplexity": round(guesses.perplexity, 3),
        "more": round(math.expm1(statistics.fmean(worse)), 5),
        "uncertainty": round(statistics.stdev(worse) / len(worse) ** 0.5, 5),
        "same_best": round(same / len(worse), 4),
    }


def main() -> None:
    """Measure the forms one after the other and print a table."""
    parser = argparse.ArgumentParser(description="Perplexity of a text with weights in several forms.")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--model", default=None, help="default: the default model")
    parser.add_argument("--weights", nargs="+", default=["fp32", "int8", "int4"], help="forms of the weights")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window-len", type=int, default=512)
    args = parse(parser)
    if args.windows < 1 or args.window_len < 2:
        parser.error(
            f"--windows must be at least 1 and --window-len 2, got {args.windows} and {args.window_len}"
        )
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read {args.text}: {error}; give a text file in UTF-8")
    model = {} if args.model is None else {"model": args.model}
    found: dict[str, Guesses] = {}
    table: dict[str, dict[str, float]] = {}
    print(f"{'weights':8} {'perplexity':>10} {'more':>9} {'+-':>7} {'same best':>10}")
    for weights in args.weights:
        llm = LLM(**model, device="cpu", quantization=weights)
        windows = cut(llm.tokenizer.encode(text, add_special=False), args.windows, args.window_len)
        found[weights] = guess(llm, windows)
        table[weights] = row = compare(found[weights], found[args.weights[0]])
        print(
            f"{weights:8} {row['perplexity']:10.3f} {row['more']:9.2%} {row['uncertainty']:7.2%} "
            f"{row['same_best']:10.1%}",
            flush=True,
        )
    if args.out:
        num = len(found[args.weights[0]].logprobs)
        revision = revision_of(resolve_model(args.model, show_progress=False).path)
        report: dict[str, object] = {"machine": facts(), "revision": revision, "text": args.text.name}
        report |= {"num_predictions": num, "weights": table}
        write(report, args.out)


if __name__ == "__main__":
    main()

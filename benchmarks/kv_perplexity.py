"""What a KV cache in 8 bits costs in accuracy: perplexity on a text, and the share of equal guesses.

    python -m benchmarks.kv_perplexity TEXT.txt [--model MODEL] [--kv auto fp8 int8] [--windows 16]

The text is cut into windows of `--window-len` tokens, and every token but the first of a window is predicted
from those before it, by an engine that keeps and reads their keys and values as it does when it serves. The
first type named is what the others are compared with. `+-` is the uncertainty of `more`: that of the mean
difference in log-probability, token by token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.machine import facts, parse, write
from benchmarks.perplexity import Guesses, compare
from infer import LLM, SamplingParams


def predict(llm: LLM, windows: list[list[int]]) -> Guesses:
    """What an engine makes of the windows."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    rows = [row for answer in llm.generate(windows, params) for row in answer.prompt_logprobs or () if row]
    return Guesses([row.logprob for row in rows], [row.top[0][0] for row in rows], [])


def main() -> None:
    """Measure the types one after the other and print a table."""
    parser = argparse.ArgumentParser(description="Perplexity of a text with a KV cache of several types.")
    parser.add_argument("text", type=Path, help="a text file in UTF-8")
    parser.add_argument("--model", default=None, help="default: the default model")
    parser.add_argument("--kv", nargs="+", default=["auto", "fp8", "int8"], help="values of kv_cache_dtype")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window-len", type=int, default=512)
    args = parse(parser)
    model = {} if args.model is None else {"model": args.model}
    text = args.text.read_text(encoding="utf-8")
    base: Guesses | None = None
    table: dict[str, dict[str, float]] = {}
    print(f"{'kv':8} {'perplexity':>10} {'more':>9} {'+-':>7} {'same best':>10}")
    for kept_as in args.kv:
        llm = LLM(**model, kv_cache_dtype=kept_as, use_prefix_caching=False)
        ids, size = llm.tokenizer.encode(text, add_special=False), args.window_len
        windows = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)][: args.windows]
        if not windows:
            parser.error(f"the text has {len(ids)} tokens, fewer than a window of {size}")
        found = predict(llm, windows)
        base = base or found
        table[kept_as] = row = compare(found, base)
        print(
            f"{kept_as:8} {row['perplexity']:10.3f} {row['more']:9.3%} {row['uncertainty']:7.3%} "
            f"{row['same_best']:10.1%}",
            flush=True,
        )
    if args.out:
        write({"machine": facts(), "text": args.text.name, "windows": args.windows, "kv": table}, args.out)


if __name__ == "__main__":
    main()

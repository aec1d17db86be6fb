"""What batching buys: the same mixed requests one at a time, in static batches, and continuously.

    python -m benchmarks.continuous_batching [--model DIR] [--requests 16] [--out FILE]

All requests are there from the start, prompts of 16 to 256 tokens, outputs of 16 to 128. Each mode runs
the same engine with one toggle changed, the modes are interleaved, and the figure of a mode is the
median of its rounds. Latency is from the start to a request's last token. The tokens of all modes
must be equal (float32): a mode that is fast and wrong is not reported.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from benchmarks.machine import facts, parse, write
from infer import LLM, SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_batch_size": 1},
    "static": {"batching_mode": "static", "max_batch_size": 8},
    "continuous": {"max_batch_size": 8},
}
NUM_BLOCKS = 256  # room for 8 sequences of 512 tokens


def make_requests(
    count: int, vocab_size: int, context_len: int, seed: int
) -> list[tuple[list[int], SamplingParams]]:
    """Mixed lengths; half of the outputs are short, as in a chat. A short context has shorter ones."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(10, min(vocab_size, 5000)) for _ in range(rng.randrange(16, 257))]
        max_tokens = rng.choice([rng.randrange(16, 33), rng.randrange(64, 129)])
        prompt, max_tokens = prompt[: context_len // 2], min(max_tokens, context_len // 2)
        made.append((prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)))
    return made


def run(
    llm: LLM, requests: list[tuple[list[int], SamplingParams]]
) -> tuple[float, list[float], list[list[int]]]:
    """Seconds for all of them, seconds until each was done, and their tokens."""
    start = time.perf_counter()
    made = [llm.encoder.make_request(prompt, params) for prompt, params in requests]
    tokens: dict[str, list[int]] = {request.request_id: [] for request in made}
    done_s: list[float] = []
    for request in made:
        llm.engine.add(request)
    while len(done_s) < len(made):
        for output in llm.engine.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                done_s.append(time.perf_counter() - start)
    return time.perf_counter() - start, done_s, list(tokens.values())


def main() -> None:
    """Run every mode, interleaved, and print one table."""
    parser = argparse.ArgumentParser(description="what batching buys, on this machine")
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parse(parser)
    llms = {
        name: LLM(args.model, dtype="float32", use_prefix_caching=False, num_blocks=NUM_BLOCKS, **knobs)
        for name, knobs in MODES.items()
    }
    first = next(iter(llms.values()))
    vocab_size, context_len = first.model_config.vocab_size, first.engine.context_len
    requests = make_requests(args.requests, vocab_size, context_len, args.seed)
    num_tokens = sum(params.max_tokens or 0 for _, params in requests)
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    latencies: dict[str, list[float]] = {name: [] for name in llms}
    answers: dict[str, list[list[int]]] = {}
    for _ in range(args.rounds):
        for name, llm in llms.items():
            total, each, answers[name] = run(llm, requests)
            seconds[name].append(total)
            latencies[name] += each
    assert all(tokens == answers["one at a time"] for tokens in answers.values()), "modes disagree"
    base = statistics.median(seconds["one at a time"])
    rows = []
    for name in llms:
        median = statistics.median(seconds[name])
        sorted_s = sorted(latencies[name])
        rows.append(
            {
                "mode": name,
                "seconds": round(median, 2),
                "tokens_per_s": round(num_tokens / median, 1),
                "speed_up": round(base / median, 2),
                "latency_p50_s": round(sorted_s[len(sorted_s) // 2], 2),
                "latency_p99_s": round(sorted_s[int(len(sorted_s) * 0.99)], 2),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    settings = {"requests": args.requests, "seed": args.seed, "rounds": args.rounds}
    write({"machine": facts(), **settings, "rows": rows}, args.out)


if __name__ == "__main__":
    main()

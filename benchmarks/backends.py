"""The backends of attention and MLP against their references: same prompts, largest difference, times.

    fast                         the backends of the knobs; without any, those of `auto` here
    torch_ref attention          its reference, for prompts and for rows that decode
    torch_ref decode attention   its reference, only for rows that decode
    torch_ref mlp                the feed-forward half of every block in plain PyTorch
    torch_ref all                attention and MLP: what the others are compared with

Each combination is an engine of its own around the same weights (config/backends.py has the table of values).
It generates greedily, and every logprob of a prompt or output token is compared with that of
`torch_ref all`, up to the first token in which the two outputs differ. Times are taken in other runs, without
logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from infer.bench.offline import batch, run_once, warm_up
from infer.bench.repeats import EngineBench, RowJob
from infer.bench.report import Report
from infer.bench.workloads import Workload, fit
from infer.config.backends import OPERATIONS, REFERENCE
from infer.engine.engine import Engine
from infer.errors import ConfigError, closest
from infer.sampling.params import SamplingParams
from infer.scheduling.request import Request

ALL = "torch_ref all"
_ATTENTION = {"attention_backend": REFERENCE, "decode_attention_backend": "auto"}
COMBINATIONS: dict[str, dict[str, str]] = {
    "fast": {},
    "torch_ref attention": _ATTENTION,
    "torch_ref decode attention": {"decode_attention_backend": REFERENCE},
    "torch_ref mlp": {"mlp_backend": REFERENCE},
    ALL: {"mlp_backend": REFERENCE} | _ATTENTION,
}


class GreedyOutput(NamedTuple):
    """The output for one prompt, and the logprob of each token."""

    ids: list[int]
    logprobs: list[float]  # logprobs of the prompt's tokens from the second on, then of the output's


def bench_backends(
    bench: EngineBench, *, count: int, prompt_len: int, num_tokens: int, only: Sequence[str]
) -> Report:
    """Run every combination on the same prompts, and report its speed and its largest difference."""
    target = bench.target
    for name in only:
        if name not in COMBINATIONS:
            hint = closest(name, COMBINATIONS)
            raise ConfigError(f"--only must be some of {', '.join(COMBINATIONS)}, got {name!r}{hint}")
    workload = batch(count, prompt_len, num_tokens, target.vocab_size, seed=bench.seed)
    workload = fit(workload, context_len=target.loaded.max_seq_len, vocab_size=target.vocab_size)
    expected = answer(target.engine(**COMBINATIONS[ALL]), workload)

    def job(name: str) -> RowJob:
        knobs: dict[str, Any] = COMBINATIONS[name]
        engine = warm_up(target.engine(**knobs), target)
        difference, num_same = compare(answer(engine, workload), expected)

        def run(repeat: int) -> dict[str, float]:
            figures = run_once(engine, workload, repeat, target.vocab_size).figures()
            bench.tell(f"{name} {repeat + 1}/{bench.repeats}: {figures['output_tokens_per_s']:.1f} tok/s")
            return figures | {"largest_difference": difference, "same_tokens": num_same}

        return RowJob(workload.name, run, knobs)

    names = [name for name in COMBINATIONS if not only or name in only]
    note = (
        f"{count} prompts of {prompt_len} tokens, {num_tokens} generated for each; largest difference: "
        f"of a token's logprob from that of `{ALL}`, up to the first token in which the outputs differ"
    )
    return bench.report(
        "backends",
        {name: partial(job, name) for name in names},
        warmup=1,
        config={f"{operation}_backend": target.knobs()[f"{operation}_backend"] for operation in OPERATIONS},
        notes=lambda rows: [note],
    )


def answer(engine: Engine, workload: Workload) -> list[GreedyOutput]:
    """Generate greedily for the workload's prompts, all at once, with the logprob of every token."""
    answers: dict[str, GreedyOutput] = {}
    for number, session in enumerate(workload.sessions):
        turn = session.turns[0]
        params = SamplingParams(
            temperature=0.0, max_tokens=turn.max_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        engine.add(Request(request_id=str(number), prompt=tuple(turn.ids), params=params))
        answers[str(number)] = GreedyOutput([], [])
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise ConfigError(f"a request of {workload.name} failed: {output.error}")
            ids, logprobs = answers[output.request_id]
            ids += output.token_ids
            logprobs += [row.logprob for row in output.prompt_logprobs or () if row is not None]
            logprobs += [row.logprob for row in output.logprobs]
    return list(answers.values())


def compare(answers: Sequence[GreedyOutput], expected: Sequence[GreedyOutput]) -> tuple[float, int]:
    """Return the largest difference of a logprob before outputs differ, and the number of equal tokens."""
    largest, num_same = 0.0, 0
    for one, other in zip(answers, expected, strict=True):
        pairs = zip(one.ids, other.ids, strict=True)
        same = next((number for number, (a, b) in enumerate(pairs) if a != b), len(one.ids))
        num_same += same
        num_prompt = len(one.logprobs) - len(one.ids)
        shared = zip(one.logprobs[: num_prompt + same], other.logprobs[: num_prompt + same], strict=True)
        largest = max([largest, *(abs(a - b) for a, b in shared)])
    return largest, num_same

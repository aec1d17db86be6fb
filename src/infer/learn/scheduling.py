"""Lesson 7: the order in which requests are served decides how long they wait."""

from __future__ import annotations

import random
from types import SimpleNamespace

from infer.bench.simulated import run_simulated
from infer.bench.traces import TraceRequest, to_workload
from infer.config.settings import EngineConfig
from infer.learn.student import Student, expect
from infer.tools.step_cost import StepCost

TITLE = "Scheduling"
STARTER = '''\
"""Lesson 7: a policy that lets short jobs go first."""


def urgency(seq):
    """Return the place of this sequence in the queue, as a number: smaller numbers go first.

    seq.num_prompt: tokens of its prompt. seq.max_total: most tokens of prompt and output together.
    seq.arrival: its number in order of arrival. seq.group.request.priority: the priority its client set.
    """
    raise NotImplementedError
'''

MUCH_BETTER = 0.7  # longest mean wait that passes, relative to serving in order of arrival


def check(student: Student) -> None:
    """Run the same load in the real scheduler, with the student's policy and in order of arrival."""
    policy, request = student.spec("urgency"), SimpleNamespace(priority=0)
    student.doing = "calling urgency(seq) for a prompt of 16 tokens"
    found = student.get("urgency")(
        SimpleNamespace(num_prompt=16, max_total=24, arrival=1, group=SimpleNamespace(request=request))
    )
    expect(isinstance(found, int | float), f"urgency must return a number, got {found!r}")
    student.doing = "serving 80 requests under your policy"
    mine, mine_served = _mean_wait(policy)
    first_come, served = _mean_wait("fcfs")
    expect(mine_served == served, f"under your policy {mine_served} of {served} requests are served")
    expect(
        mine <= MUCH_BETTER * first_come,
        f"requests wait {mine:.2f} s on average; in order of arrival it is {first_come:.2f} s, and at most "
        f"{MUCH_BETTER * first_come:.2f} s is required. Which requests should go first, so that few "
        "wait for many?",
    )


def _mean_wait(policy: str) -> tuple[float, int]:
    rng = random.Random(2)
    load = [
        TraceRequest(
            arrival=0.02 * number,
            prompt_len=rng.choice((16, 16, 16, 400)),
            output_len=rng.choice((4, 8, 120)),
        )
        for number in range(80)
    ]
    config = EngineConfig.from_knobs(
        scheduler_policy=policy, num_blocks=512, max_batch_size=4, max_num_batched_tokens=64
    )
    result = run_simulated(to_workload("lesson", load), config, StepCost())
    waits = [trace.queue_s or 0.0 for trace in result.traces if trace.is_ok]
    return sum(waits) / max(len(waits), 1), len(waits)

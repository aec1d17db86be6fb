"""A client's request and the outputs it gets back, in token ids.

A `Request` is frozen; everything that changes while it is served is in its `Sequence`s. Each step that makes
tokens for it yields one `StepOutput` per sequence. An embedding is a request with a `pooling`: its only
output comes with the last chunk of its prompt and contains no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs, SamplingParams

POOLINGS = ("last", "mean")  # ways to make an embedding of a prompt's hidden states


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it, or how to pool its hidden states."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # smaller is more urgent, for the `priority` policy
    deadline: float | None = None  # engine-clock seconds by which it should end, for the `deadline` policy
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    adapter: str = ""  # name of its LoRA adapter; empty: the base model
    pooling: str | None = None  # one of POOLINGS: return an embedding of the prompt, and no tokens


class DraftCounts(NamedTuple):
    """The counts of a sequence's drafts."""

    num_drafts: int
    by_length: tuple[int, ...]  # number of windows by accepted drafts, from 0
    saved_s: float = 0.0  # estimated seconds saved; negative if drafts cost more than they saved

    @property
    def num_windows(self) -> int:
        """The number of steps in which the sequence had drafts."""
        return sum(self.by_length)

    @property
    def num_accepted(self) -> int:
        """The number of accepted drafts."""
        return sum(length * count for length, count in enumerate(self.by_length))

    def to_wire(self) -> dict[str, Any]:
        """Return the counts and rates under vLLM's names, and the seconds saved."""
        return {
            "mean_acceptance_length": 1 + self.num_accepted / self.num_windows,
            "draft_acceptance_rate": self.num_accepted / self.num_drafts,
            "acceptance_histogram": list(self.by_length),
            "num_spec_steps": self.num_windows,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_drafts,
            "seconds_saved": self.saved_s,
        }


class StepOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The output of one step for one sequence of a request; a msgspec struct because thousands are made.

    Outputs between the first and the last of a sequence usually contain only token ids.
    """

    request_id: str
    index: int  # number of the sequence within the request
    token_ids: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...] = ()  # one per token, if logprobs or best_of asked for them
    finish_reason: FinishReason | None = None  # None: the sequence continues
    stop_reason: int | None = None  # the request's stop token that ended it; None: EOS or another reason
    cumulative_logprob: float = 0.0  # logprob of the whole output; 0 unless logprobs, best_of or beams use it
    added_at: float = 0.0  # perf_counter seconds of the request's arrival; in the first and last output
    queue_s: float = 0.0  # seconds the request waited before its first step; in the first and last output
    made_at: float = 0.0  # perf_counter seconds when this output was made; in the first and last output
    num_cached: int = 0  # prompt tokens found in the prefix cache; in the first and last output
    prompt_logprobs: tuple[RowLogprobs | None, ...] | None = None  # once, with the first token
    error: str | None = None  # error message, with finish_reason "error"
    param: str | None = None  # the request field that caused the error; None: the engine did
    drafts: DraftCounts | None = None  # totals so far, after each step with drafts and in the last output
    embedding: tuple[float, ...] = ()  # pooled hidden states of the prompt, if requested

"""A client's request and the outputs it gets back, in token ids.

A `Request` is frozen when it arrives; everything that changes while it is served lives in its
`Sequence`s. Each step that makes tokens for it yields one `StepOutput` per sequence. An embedding is a
request with a `pooling`: its one output comes with the last chunk of its prompt and holds no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from infer.finish_reason import FinishReason
from infer.sampling.params import RowLogprobs, SamplingParams

POOLINGS = ("last", "mean")  # the hidden states of a prompt that make its embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it, or how to pool its hidden states."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # smaller is more urgent; read by the `priority` policy
    deadline: float | None = None  # engine-clock seconds by which it should end; read by `deadline`
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    adapter: str = ""  # the name of the LoRA adapter that it is computed with; none: the model as it is
    pooling: str | None = None  # one of POOLINGS: answer with an embedding of the prompt, and no token


class DraftCounts(NamedTuple):
    """The outcome of the drafts of one sequence."""

    num_drafts: int
    by_length: tuple[int, ...]  # windows by the number of drafts kept, from 0
    saved_s: float = 0.0  # seconds that they saved, estimated; below 0: they took longer than they saved

    @property
    def num_windows(self) -> int:
        """The number of steps in which the sequence had drafts."""
        return sum(self.by_length)

    @property
    def num_accepted(self) -> int:
        """The number of drafts that were kept."""
        return sum(length * count for length, count in enumerate(self.by_length))

    def to_wire(self) -> dict[str, Any]:
        """The counts and what follows from them, in vLLM's words, and what they saved."""
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
    """The output of one step for one sequence of a request; made by the thousand, so not a dataclass.

    Between its first and its last output, a sequence has outputs that hold their token and nothing else.
    """

    request_id: str
    index: int  # number of the sequence within the request
    token_ids: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...] = ()  # one per token, where the request asked
    finish_reason: FinishReason | None = None  # None: it goes on
    stop_reason: int | None = None  # the stop token that ended it, where it was not the model's own EOS
    cumulative_logprob: float = 0.0  # logprob of the whole output; 0 unless logprobs, best_of or beams ask
    added_at: float = 0.0  # perf_counter seconds when the engine took the request; in the first and the last
    queue_s: float = 0.0  # seconds the request waited before its first step; in the first and the last
    made_at: float = 0.0  # perf_counter seconds when this output was made; in the first and the last
    num_cached: int = 0  # prompt tokens that came from the prefix cache; in the first and the last
    prompt_logprobs: tuple[RowLogprobs | None, ...] | None = None  # once, with the first token
    error: str | None = None  # what went wrong, with finish_reason "error"
    param: str | None = None  # the field of the request that is to blame for it; None: the engine is
    drafts: DraftCounts | None = None  # totals so far, with each step that judged some, and with the last
    embedding: tuple[float, ...] = ()  # pooled hidden states of a prompt, where the request asked for them

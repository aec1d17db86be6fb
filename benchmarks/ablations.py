"""The ideas that the matrix switches on one after the other, as data.

Each has a workload where it should show and one where it could hurt, and words for both: why it helps,
what it means if it did not (`unless`), and what it costs where it cannot help (`price`). Two of them cost
nothing there, so a difference in their rows is noise, and the report calls it that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GPU = "needs a GPU"
GPU_SHAPE = "needs a checkpoint or a --model-config on a GPU"
CPU_MODEL = "needs a checkpoint on a CPU"


class Look(NamedTuple):
    """A workload, and its figure in which an idea shows."""

    workload: str
    figure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """One idea that the matrix switches on: its knobs, where it shows and where it could hurt."""

    name: str
    knobs: Mapping[str, Any]
    best: Look
    risk: Look
    why: str  # reason why it helps
    unless: str  # the reason if it ought to help and does not
    price: str  # its effect where it cannot help
    is_idle_at_risk: bool = False  # the switch changes nothing there: any difference is noise
    without: Mapping[str, Any] = field(default_factory=dict)  # knobs of its own "before", if not BASE
    above: str = ""  # sentence on what the rows above have, if its "before" is not theirs
    needs: str = ""  # GPU, GPU_SHAPE or CPU_MODEL


BASE: Mapping[str, Any] = {
    "batching_mode": "static",
    "kv_cache_backend": "contiguous",
    "use_chunked_prefill": False,
    "use_prefix_caching": False,
    "use_cuda_graphs": False,
    "use_overlap": False,
}

ABLATIONS = (
    Ablation(
        name="continuous",
        knobs={"batching_mode": "continuous"},
        best=Look("continuous_batching", "ttft_p50_s"),
        risk=Look("baseline", "output_tokens_per_s"),
        why="a request that arrives joins at the next step, and does not wait until a whole batch is done",
        unless="batches are done before the next request comes, so no request waits for one",
        price="with one request at a time there is no batch to join",
        is_idle_at_risk=True,
    ),
    Ablation(
        name="paged",
        knobs={"kv_cache_backend": "paged"},
        best=Look("paged_attention", "output_tokens_per_s"),
        risk=Look("w1_single", "output_tokens_per_s"),
        why="a sequence takes the blocks it fills and not the longest length, so more run in the same memory",
        unless="more sequences at once are no faster here: the machine is busy with those it has",
        price="one sequence has memory enough either way, and its blocks must be found through a table",
    ),
    Ablation(
        name="chunked",
        # Pieces alone do not shorten a step: under the default budget several prompts' pieces share one.
        knobs={"use_chunked_prefill": True, "prefill_chunk_size": 256, "max_num_batched_tokens": 256},
        best=Look("chunked_prefill", "itl_p99_s"),
        risk=Look("prefill_8x4096", "ttft_p50_s"),
        why="prompts come in pieces and a step holds 256 tokens in all, so a decode waits for less",
        unless="a whole prompt is computed so fast that it holds no other up",
        price="nothing decodes meanwhile, and every piece pays for a step of its own",
    ),
    Ablation(
        name="prefix",
        knobs={"use_prefix_caching": True},
        best=Look("prefix_caching", "ttft_p50_s"),
        risk=Look("w2_mixed", "output_tokens_per_s"),
        why="a start that was computed before is taken from the cache",
        unless="the shared start is computed so fast that finding it saves nothing",
        price="nothing is shared, so looking it up and keeping it is all there is",
    ),
    Ablation(
        name="graphs",
        knobs={"use_cuda_graphs": True},
        best=Look("b1_256_256", "output_tokens_per_s"),
        risk=Look("b128_256_256", "output_tokens_per_s"),
        why="a decode step is launched as one graph, so Python no longer sets the pace",
        unless="the GPU takes longer for a step than Python does to launch it",
        price="a large batch keeps the GPU busy while Python launches, and padding costs a little",
        needs=GPU,
    ),
    Ablation(
        name="overlap",
        knobs={"use_overlap": True},
        best=Look("b32_256_256", "output_tokens_per_s"),
        risk=Look("b1_256_256", "output_tokens_per_s"),
        why="the next step is planned while the GPU computes this one",
        unless="a plan takes so little time that hiding it changes nothing",
        price="there is little to plan for one sequence",
        needs=GPU,
    ),
    Ablation(
        name="quant",
        knobs={"quantization": "int8"},
        without={"quantization": "fp32"},
        above="Its before is fp32; the rows above have the weights as they were loaded.",
        best=Look("b1_256_256", "output_tokens_per_s"),
        risk=Look("prefill_8x4096", "ttft_p50_s"),
        why="a step reads every weight, and they are a quarter of the bytes",
        unless="reading the weights is not what takes the time here",
        price="a prompt is limited by its multiplications and not by reading weights",
        needs=CPU_MODEL,
    ),
    Ablation(
        name="program",
        knobs={"record_cpu_step": True},
        without={"record_cpu_step": False},
        above="Every row above has it on already, on both sides; here alone the before is without it.",
        best=Look("b1_256_256", "output_tokens_per_s"),
        risk=Look("prefill_8x4096", "ttft_p50_s"),
        why="the kernels of a decode step are a list that C runs, and Python calls it once",
        unless="the kernels take so long that what Python adds between them does not count",
        price="the kernels of a prompt are called one by one either way",
        is_idle_at_risk=True,
        needs=CPU_MODEL,
    ),
    Ablation(
        name="speculation",
        knobs={"speculative_method": "ngram", "synthetic_acceptance": 0.7},
        best=Look("b1_256_256", "output_tokens_per_s"),
        risk=Look("b32_256_256", "output_tokens_per_s"),
        why="a step judges several guesses, each right with a probability of 0.7, in hardly more time",
        unless="a step takes longer with every token it computes, so guesses are not free",
        price="a batch has work enough for a step, so sequences get few guesses or none",
    ),
    Ablation(
        name="codes",
        knobs={"quantization": "int4"},
        without={"quantization": "none"},
        above="Its before has plain weights; the rows above have the weights as they were loaded.",
        best=Look("b1_256_256", "output_tokens_per_s"),
        risk=Look("b128_256_256", "output_tokens_per_s"),
        why="a step reads every weight, and they are a quarter of the bytes",
        unless="a matrix is read so fast that the time between two of them is the larger part",
        price="many rows share one reading, and codes must be turned into numbers before they are multiplied",
        needs=GPU_SHAPE,
    ),
)

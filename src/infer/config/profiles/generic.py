"""The profile of a GPU that was not measured: the H200's numbers, without those known to be wrong elsewhere.

A number measured on another GPU is better than a number measured on none. The sizes of steps depend on the
GPU's memory, and kernels query its number of SMs.
"""

from __future__ import annotations

from dataclasses import replace

from infer.config.profiles.hopper_h200 import H200

_RULE = replace(H200.linear, gemv={}, skinny={}, rule_tokens=128)  # no matrix was measured

GENERIC = replace(
    H200,
    name="generic",
    measured_on="",
    generation=0,
    attention=replace(H200.attention, cudnn_min_lens={}),  # cuDNN has other kernels for other generations
    linear=replace(_RULE, block_k=64, gated_block_k=64, num_stages=3),  # fits the 99 KB of smaller GPUs
)

"""Lesson 9: weights in four bits, with a scale for each group."""

from __future__ import annotations

import numpy as np

from infer.learn.student import Student, expect, expect_ints

TITLE = "Quantization"
STARTER = '''\
"""Lesson 9: 4-bit weights."""


def quantize(weights, group_size):
    """Return (codes, scales) of a list of weights.

    codes: a whole number from -8 to 7 for each weight; scales: one number for each group of group_size
    neighbours. code * scale should be as close to the weight as possible.
    """
    raise NotImplementedError


def dequantize(codes, scales, group_size):
    """Return the weights that codes and scales represent."""
    raise NotImplementedError
'''

LOOSEST = 1.1  # largest step between two codes, relative to the step of symmetric rounding


def check(student: Student) -> None:
    """Check codes, scales and errors of weights with outliers, and of a group of zeros."""
    quantize, dequantize = student.get("quantize"), student.get("dequantize")
    rng = np.random.default_rng(4)
    for group_size in (4, 32):
        weights = rng.standard_normal(128).astype(np.float64) * 0.05
        weights[7] = 1.5  # an outlier, which must affect its own group only
        weights[64:96] = 0.0
        student.doing = f"quantizing 128 weights in groups of {group_size}"
        made = quantize(weights.tolist(), group_size)
        expect(
            isinstance(made, tuple) and len(made) == 2, f"quantize must return (codes, scales), got {made!r}"
        )
        codes, scales = expect_ints(made[0], "codes"), [float(scale) for scale in made[1]]
        expect(len(codes) == 128, f"there are {len(codes)} codes for 128 weights")
        expect(
            len(scales) == 128 // group_size,
            f"there are {len(scales)} scales for {128 // group_size} groups of {group_size}",
        )
        wrong = [code for code in codes if not -8 <= code <= 7]
        expect(not wrong, f"a code of 4 bits is from -8 to 7, got {wrong[:1]}")
        student.doing = "dequantizing them"
        back = np.asarray(dequantize(codes, scales, group_size), dtype=np.float64)
        expect(back.shape == (128,), f"dequantize must return 128 weights, got the shape {back.shape}")
        expect(
            bool(np.isfinite(back).all()),
            "a weight comes back as inf or nan: a group of zeros has the scale 0",
        )
        for group in range(128 // group_size):
            part = slice(group * group_size, (group + 1) * group_size)
            step = np.abs(weights[part]).max() / 7
            error = np.abs(back[part] - weights[part]).max()
            expect(
                error <= LOOSEST * step / 2 + 1e-12,
                f"group {group} of {group_size} weights: the largest error is {error:.5f}; rounding to the "
                f"nearest of 15 steps over this group makes at most {step / 2:.5f}",
            )

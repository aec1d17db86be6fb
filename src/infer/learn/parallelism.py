"""Lesson 12: a layer on several devices, each of which has a part of the weights."""

from __future__ import annotations

import numpy as np

from infer.learn.student import Student, Wrong, expect

TITLE = "Tensor parallelism"
STARTER = '''\
"""Lesson 12: an MLP on several ranks. The whole of it is  down @ relu(up @ x)."""

import numpy as np


def split(up, down, num_ranks):
    """Return one pair of matrices for each rank.

    up: [F, D], down: [D, F]. F is a multiple of num_ranks. Each rank gets 1 / num_ranks of all weights, and
    the sum of  down_part @ relu(up_part @ x)  over the ranks is the result: one sum for two matrices.
    """
    raise NotImplementedError
'''

TOLERANCE = 1e-9


def check(student: Student) -> None:
    """Compute with the parts and compare their sum with the whole layer."""
    split, rng = student.get("split"), np.random.default_rng(7)
    for num_ranks in (1, 2, 4):
        up, down = rng.standard_normal((16, 6)), rng.standard_normal((6, 16))
        student.doing = f"splitting matrices of 16x6 and 6x16 for {num_ranks} ranks"
        parts = list(split(up.copy(), down.copy(), num_ranks))
        expect(len(parts) == num_ranks, f"there are {len(parts)} parts for {num_ranks} ranks")
        sums, x = np.zeros(6), rng.standard_normal(6)
        for rank, part in enumerate(parts):
            expect(len(part) == 2, f"the part of rank {rank} is not a pair of matrices")
            mine_up, mine_down = (np.asarray(matrix, dtype=np.float64) for matrix in part)
            size = mine_up.size + mine_down.size
            expect(
                size == (up.size + down.size) // num_ranks,
                f"rank {rank} has {size} of {up.size + down.size} weights; its share is 1/{num_ranks}",
            )
            try:
                sums += mine_down @ np.maximum(mine_up @ x, 0)
            except ValueError as error:
                raise Wrong(
                    f"rank {rank} cannot multiply its parts, of the shapes {mine_up.shape} and "
                    f"{mine_down.shape} ({error}); which rows of up belong to which columns of down?"
                ) from None
        right = down @ np.maximum(up @ x, 0)
        expect(
            bool(np.abs(sums - right).max() < TOLERANCE),
            f"with {num_ranks} ranks the sum of the parts is off by {np.abs(sums - right).max():.3f}: a row "
            "of up and the column of down that reads it must be on the same rank",
        )

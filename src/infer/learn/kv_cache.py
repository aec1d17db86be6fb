"""Lesson 2: keys and values of tokens that were already processed need not be computed again."""

from __future__ import annotations

import numpy as np
import torch

from infer.kernels.attention.reference import attend_naive
from infer.layers.rotary import frequencies
from infer.learn.student import Student, Wrong, expect

TITLE = "The KV cache"
STARTER = '''\
"""Lesson 2: attention with a cache, and positions by rotation (RoPE)."""

import numpy as np


def rotate(vector, position, theta=10000.0):
    """Return the vector (D numbers, D even) rotated by its position.

    Numbers i and i + D/2 form a pair. Pair i is rotated by the angle position * theta ** (-2 * i / D).
    """
    raise NotImplementedError


class Cache:
    """The keys and values of one head."""

    def __init__(self):
        raise NotImplementedError

    def append(self, key, value):
        """Store the key and the value of the next token; the key is already rotated by its position."""
        raise NotImplementedError

    def attend(self, query):
        """Return the attention of one rotated query over all stored tokens.

        weights = softmax(query . key / sqrt(D)); the result is the weighted sum of the values.
        """
        raise NotImplementedError
'''

HEAD_DIM = 16
TOLERANCE = 1e-4


def check(student: Student) -> None:
    """Compare rotation and attention with the engine's, one token after the other."""
    rng = np.random.default_rng(0)
    rotate, cache = student.get("rotate"), student.get("Cache")()
    for position in (0, 1, 7, 300):
        vector = rng.standard_normal(HEAD_DIM).astype(np.float32)
        student.doing = f"rotating a vector of {HEAD_DIM} numbers to position {position}"
        got = _array(rotate(vector.copy(), position), HEAD_DIM, "rotate")
        right = _rotated(vector, position)
        if np.abs(got - right).max() > TOLERANCE:
            half, turns = HEAD_DIM // 2, frequencies(HEAD_DIM, 10000.0).tolist()
            place = int(np.abs(got - right).argmax())
            expect(
                bool(np.abs(got - _interleaved(vector, position)).max() > TOLERANCE),
                "rotate pairs neighbours (0 with 1); here number i belongs to number i + D/2",
            )
            raise Wrong(
                f"rotate(vector, {position}): number {place} is {got[place]:.5f} instead of "
                f"{right[place]:.5f} (pair {place % half}, angle {position * turns[place % half]:.5f})"
            )
    keys, values = list[np.ndarray](), list[np.ndarray]()
    for position in range(12):
        key, value, query = (rng.standard_normal(HEAD_DIM).astype(np.float32) for _ in range(3))
        key, query = _rotated(key, position), _rotated(query, position)
        keys.append(key)
        values.append(value)
        student.doing = f"appending token {position} and attending to {position + 1} tokens"
        cache.append(key.copy(), value.copy())
        got = _array(cache.attend(query.copy()), HEAD_DIM, "attend")
        right = _attended(query, np.stack(keys), np.stack(values))
        expect(
            bool(np.abs(got - right).max() <= TOLERANCE),
            f"after {position + 1} tokens attend is off by {np.abs(got - right).max():.4f}; is the product "
            "divided by sqrt(D), and does the softmax go over all tokens that were kept?",
        )


def _rotated(vector: np.ndarray, position: int) -> np.ndarray:
    angles = position * frequencies(HEAD_DIM, 10000.0).numpy()
    low, high = np.split(vector, 2)
    return np.concatenate(
        [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    )


def _interleaved(vector: np.ndarray, position: int) -> np.ndarray:
    angles = position * frequencies(HEAD_DIM, 10000.0).numpy()
    even, odd = vector[::2], vector[1::2]
    turned = np.empty_like(vector)
    turned[::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[1::2] = odd * np.cos(angles) + even * np.sin(angles)
    return turned


def _attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the result of the engine's reference attention for one query of one head."""
    q, k, v = (torch.from_numpy(part.astype(np.float32)) for part in (query[None], keys, values))
    out = attend_naive(q[:, None], k[:, None], v[:, None], scale=HEAD_DIM**-0.5, window=None)
    result: np.ndarray = out[0, 0].numpy()
    return result


def _array(value: object, size: int, name: str) -> np.ndarray:
    try:
        found = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise Wrong(f"{name} must return {size} numbers, got {value!r}") from None
    expect(found.shape == (size,), f"{name} must return {size} numbers, got the shape {found.shape}")
    return found

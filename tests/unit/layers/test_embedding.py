from __future__ import annotations

import torch

from infer.layers.embedding import Embedding, round_to


def test_rows_are_looked_up_by_id() -> None:
    embedding = Embedding(5, 3)
    embedding.weight.data = torch.arange(15.0).reshape(5, 3)

    assert embedding(torch.tensor([4, 0, 4])).tolist() == [[12, 13, 14], [0, 1, 2], [12, 13, 14]]


def test_the_scale_is_rounded_to_the_dtype_of_the_rows() -> None:
    torch.set_default_dtype(torch.bfloat16)  # as it is while a model in bfloat16 is being built
    try:
        embedding = Embedding(1, 1152, scale=1152**0.5)
    finally:
        torch.set_default_dtype(torch.float32)
    embedding.weight.data.fill_(1.0703125)

    # 1.0703125 * 34 = 36.39 rounds to 36.5 in bfloat16; with the exact 33.94 it would be 36.25
    assert set(embedding(torch.tensor([0]))[0].tolist()) == {36.5}

    assert round_to(1152**0.5, torch.bfloat16) == 34.0
    assert abs(round_to(1152**0.5, torch.float32) - 1152**0.5) < 1e-5

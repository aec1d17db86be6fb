"""What a head is told of a step: the token after each of its tokens, known or drawn."""

from __future__ import annotations

import numpy as np
import torch

from infer.execution.gpu.step_inputs import Prompts
from infer.execution.head_model import drawn_places, following_tokens, kept_ids, with_drawn
from infer.execution.order import DECODE, EMPTY, PROMPT, VERIFY, StepOrder


def order_of(
    kinds: list[int], counts: list[int], sampled: list[int], tokens: list[int], following: list[int]
) -> StepOrder:
    return EMPTY._replace(
        rows=np.arange(len(kinds), dtype=np.int32),
        kinds=np.array(kinds, dtype=np.int8),
        starts=np.zeros(len(kinds), dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        num_sampled=np.array(sampled, dtype=np.int16),
        tokens=np.array(tokens, dtype=np.uint32),
        slots=np.zeros((1, len(tokens)), dtype=np.int32),
        next_tokens=np.array(following, dtype=np.uint32),
    )


# a row that decodes, the end of a prompt, another row that decodes, the middle of a prompt
MIXED = order_of(
    [DECODE, PROMPT, DECODE, PROMPT], [1, 3, 1, 2], [1, 1, 1, 0], [21, 22, 23, 41, 42], [0, 0, 0, 43]
)


def test_given_tokens_follow_each_other_and_drawn_ids_the_rest() -> None:
    assert drawn_places(MIXED).tolist() == [0, 3, 4]
    assert following_tokens(MIXED).tolist() == [-1, 22, 23, -2, -3, 42, 43]
    assert following_tokens(MIXED, np.array([0, 8, 1])).tolist() == [-1, 22, 23, -9, -2, 42, 43]
    tokens = with_drawn(torch.from_numpy(following_tokens(MIXED)), torch.tensor([70, 71, 72]))
    assert tokens.tolist() == [70, 22, 23, 71, 72, 42, 43]


def test_a_step_that_draws_nothing_has_known_tokens_only() -> None:
    middle = order_of([PROMPT], [3], [0], [5, 6, 7], [8])
    following = torch.from_numpy(following_tokens(middle))
    assert with_drawn(following, torch.empty(0, dtype=torch.int64)).tolist() == [6, 7, 8]


def test_every_place_of_a_window_is_followed_by_what_is_drawn_there() -> None:
    windows = order_of([VERIFY, VERIFY], [3, 1], [3, 1], [5, 6, 7, 8], [])
    assert following_tokens(windows).tolist() == [-1, -2, -3, -4]
    assert kept_ids(windows, [(6, 9), (4,)]).tolist() == [6, 9, 0, 4]


def test_a_row_that_forks_goes_on_from_its_first_id() -> None:
    forks = order_of([PROMPT, PROMPT], [2, 1], [1, 0], [5, 6, 7], [0, 8])
    assert kept_ids(forks, [(30, 31, 32), ()]).tolist() == [30]


def test_tokens_stand_on_the_device_behind_rows_that_decode_and_their_padding() -> None:
    prompts = Prompts(MIXED, first=4)
    assert prompts.places.tolist() == [0, 4, 5, 6, 1, 7, 8]
    assert prompts.end == 9

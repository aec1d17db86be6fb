"""Masks of rows: each row of a step is sampled under its own or under none, and nothing is sent in vain."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from infer.execution.gpu import masks as device_masks
from infer.execution.gpu.masks import DeviceMasks
from infer.execution.gpu.sending import send_into
from infer.kernels.sampling.sample_state import SampleState, num_mask_words

VOCAB_SIZE = 67


@pytest.fixture
def state() -> SampleState:
    return SampleState.empty(4, "cpu", VOCAB_SIZE)


def send(masks: DeviceMasks, **lines: int) -> None:
    """Send a step's masks: a line of equal words for each row, named by its number."""
    taken = masks.take(len(lines))
    assert taken.shape == (len(lines), num_mask_words(VOCAB_SIZE)) and taken.dtype == np.int32
    taken[:] = np.array(list(lines.values()), dtype=np.int32)[:, None]
    masks.send(np.array([int(name.removeprefix("row")) for name in lines], dtype=np.int64))


def found(state: SampleState) -> list[int | None]:
    """The word of each row's mask."""
    lines = state.mask_row_R.tolist()
    assert all(len(set(line)) == 1 for line in state.masks_RW.tolist())
    return [None if line < 0 else int(state.masks_RW[line, 0]) for line in lines]


def test_rows_have_the_masks_of_the_last_step_and_no_others(state: SampleState) -> None:
    masks = DeviceMasks(state)
    assert not masks.has_any
    send(masks, row2=5, row0=-1)
    assert found(state) == [-1, None, 5, None] and masks.has_any
    send(masks, row3=7)
    assert found(state) == [None, None, None, 7]
    send(masks, row3=9, row1=8, row0=3, row2=4)
    assert found(state) == [3, 8, 4, 9]
    masks.clear()
    assert found(state) == [None] * 4 and not masks.has_any


def test_which_line_is_whose_is_sent_when_it_changes(state: SampleState) -> None:
    masks = DeviceMasks(state)
    with mock.patch.object(device_masks, "send_into", wraps=send_into) as sent:
        for word in range(5):
            send(masks, row1=word, row3=-word)
            assert found(state) == [None, word, None, -word]
        assert sent.call_count == 1
        send(masks, row3=1, row1=2)  # in another order
        assert sent.call_count == 2


def test_the_rows_of_the_last_step_are_not_sent_again(state: SampleState) -> None:
    masks, rows = DeviceMasks(state), np.array([1, 3])
    with mock.patch.object(device_masks, "send_into", wraps=send_into) as sent:
        for number, change in enumerate([lambda: None, lambda: masks.forget(1), masks.clear]):
            change()
            state.mask_row_R[1] = -1 if number == 1 else state.mask_row_R[1]  # as `enter_rows` does
            for word in range(3):
                masks.take(2)[:] = np.array([[word], [7]])
                masks.send(rows)
                assert found(state) == [None, word, None, 7]
        assert sent.call_count == 1 + 1 + 2, "of lines; a clear sends some too"


def test_a_row_that_was_entered_anew_gets_its_mask_again(state: SampleState) -> None:
    masks = DeviceMasks(state)
    send(masks, row1=3)
    masks.forget(1)
    state.mask_row_R[1] = -1  # as `enter_rows` does
    send(masks, row1=4)
    assert found(state) == [None, 4, None, None]

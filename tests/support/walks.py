"""Random outputs that a constraint allows, drawn token by token from its masks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from infer.constraints.compiler import Grammar
from infer.constraints.guide import ENDED, Guide
from tests.support.words import EOS_IDS, VOCAB_SIZE, token_of

NUM_WORDS = -(-VOCAB_SIZE // 32)
CLOSING = [token_of(text) for text in ('"', "}", "]", '"}', "{}", "[]", "0", "1", "true", "b", "z", ":")]


def allowed_ids(guide: Guide) -> np.ndarray:
    """The ids that may come next."""
    mask_W = np.zeros(NUM_WORDS, dtype=np.int32)
    guide.fill(mask_W)
    return np.unpackbits(mask_W.view(np.uint8), bitorder="little")[:VOCAB_SIZE].nonzero()[0]


def num_valid(guide: Guide, ids: Sequence[int]) -> int:
    """How many of these ids could follow, from the first on."""
    trial = guide.copy()
    for number, token_id in enumerate(ids):
        forced = trial.forced() if trial.has_mask else ()
        if trial.state == ENDED or (forced and token_id != forced[0]):
            return number
        if trial.matcher is not None and not trial.matcher.validate_tokens([token_id]):
            return number
        trial.consume((token_id,))
    return len(ids)


def walk(grammar: Grammar, rng: random.Random, max_tokens: int = 300) -> list[int] | None:
    """The ids of an output that has ended; None: it would have gone on. In a hurry to close what is open."""
    guide, output = Guide(grammar), list[int]()
    while len(output) < max_tokens:
        choices = allowed_ids(guide).tolist()  # before the grammar is asked what must come
        assert guide.error is None, guide.error
        assert choices, "nothing may follow"
        forced = guide.forced()
        if forced:
            assert choices == [forced[0]], "its own mask says the same"
        else:
            if (ends := [i for i in choices if i in EOS_IDS]) and rng.random() < 0.5:
                return output
            hurry = min(0.4 + len(output) / 100, 1.0)
            if (closing := [i for i in CLOSING if i in set(choices)]) and rng.random() < hurry:
                choices = closing
            choices = [i for i in choices if i not in ends] or [0]
            forced = (rng.choice(choices),)
        guide.consume(forced)
        output += forced
        assert guide.error is None, guide.error
        if guide.state == ENDED:
            return output
    return None

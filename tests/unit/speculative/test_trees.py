"""Trees of drafts: their shapes, how windows of them are judged and moved, and the law of what they leave.

The law is that of shared noise (test_laws.py). Here the engine's own functions judge, for trees of its own
shapes: every noise and every draft of a small vocabulary is visited, and probabilities are fractions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from infer.execution.device import StateShape
from infer.execution.host_sampling import SyntheticJudge, kept_nodes, num_kept
from infer.execution.order import DRAWS_BEST, EMPTY, PROMPT, VERIFY, StepOrder, read, to_bytes
from infer.execution.trees import kept_path, main_line, moved_slots, nodes_of
from infer.kernels.elementwise.no_tree import NO_TREE
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, best_ids, sample
from infer.speculative.adaptive import Acceptance, DraftLengths, StepCosts
from infer.speculative.tree import WIDTH, chain_of, grown, survival, tree_of, turns_of
from infer.tools.order_replay import DeviceLimits, wrong_number
from tests.unit.speculative.test_laws import (
    NUM_VALUES,
    PAIRS,
    Drawn,
    Prefix,
    by_argmax,
    by_inverse_cdf,
    drawn_from,
    every_noise,
    law_of,
    plain_text,
    product,
    some_model,
)

LIMITS = DeviceLimits(
    shape=StateShape(num_rows=16, max_blocks=8, block_size=4),
    num_blocks=64,
    num_host_blocks=4,
    vocab_size=1000,
    max_tokens=64,
)


@pytest.mark.parametrize("num_drafts", range(17))
def test_a_tree_begins_with_its_main_line_and_parents_come_first(num_drafts: int) -> None:
    tree = tree_of(num_drafts)
    assert len(tree.backs) == len(tree.ranks) == len(tree.depths) == num_drafts
    assert tree.depth == turns_of(num_drafts) == main_line(tree.backs)
    assert tree.ranks[: tree.depth] == (0,) * tree.depth
    depths, children = [0], Counter[tuple[int, int]]()
    for node, (back, rank, depth) in enumerate(zip(*tree, strict=True), 1):
        assert 1 <= back <= node and rank < WIDTH
        depths.append(depths[node - back] + 1)
        assert depths[-1] == depth
        children[node - back, rank] += 1
    assert all(count == 1 for count in children.values())
    for depth in range(tree.depth + 1):
        part = tree.cut(depth)
        assert part.depths == tuple(each for each in tree.depths if each <= depth)
        assert part.depth == depth and main_line(part.backs) == depth
    assert chain_of(num_drafts).depth == num_drafts


def test_a_tree_grows_by_its_likeliest_node() -> None:
    paths = grown(16)
    assert len(set(paths)) == 16 and {len(path) for path in paths} == {1, 2, 3, 4, 5, 6}
    for count in range(16):
        assert set(grown(count)) < set(paths) and grown(count) == paths[:count]
    for rate in (0.05, 0.5, 0.9):
        chances = [1.0]
        for place in range(16):
            chances.append(survival(chances[-1], rate, place))
        assert chances == sorted(chances, reverse=True) and chances[1] == rate


def test_a_side_line_is_kept_where_its_tokens_are_drawn() -> None:
    drafts, backs = [11, 12, 13, 14, 21, 31, 17, 22], [1, *tree_of(8).backs]
    drawn = [21, 0, 0, 0, 0, 22, 0, 0, 99]  # node 5 is the second guess, node 8 follows it
    assert kept_path(drawn, drafts, backs) == [0, 5, 8]
    assert kept_nodes(num_kept, drawn, drafts, backs) == [0, 5, 8]
    assert kept_path([11, 12, 13, 14, 5, 0, 0, 0, 0], drafts, backs) == [0, 1, 2, 3, 4]
    assert kept_path([1] * 9, drafts, backs) == [0]
    assert list(kept_nodes(SyntheticJudge(1.0), drawn, drafts, backs)) == [0, 1, 2, 3, 4]
    assert list(kept_nodes(num_kept, [11, 5], [11], None)) == [0, 1]


def window_order(num_drafts: int = 8) -> StepOrder:
    """A tree at position 20, next to a chain of two drafts."""
    counts = np.array([3, num_drafts + 1], dtype=np.int32)
    backs = np.array([1, 1, 1, 1, *tree_of(num_drafts).backs], dtype=np.int8)
    num_tokens = len(backs)
    return EMPTY._replace(
        flags=4,
        rows=np.array([2, 0], dtype=np.int32),
        starts=np.array([5, 20], dtype=np.int32),
        counts=counts,
        num_sampled=counts.astype(np.int16),
        num_draws=np.ones(2, dtype=np.int16),
        adapters=np.zeros(2, dtype=np.int16),
        kinds=np.full(2, VERIFY, dtype=np.int8),
        tokens=np.array([1, 2, 3, 10, 11, 12, 13, 14, 21, 31, 17, 22][:num_tokens], dtype=np.uint32),
        slots=np.array([[40 + n for n in range(num_tokens)]], dtype=np.int32),
        backs=backs,
    )


def test_nodes_have_a_depth_and_see_their_ancestors() -> None:
    nodes = nodes_of(window_order())
    assert nodes.depths_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 1, 1, 2, 2]
    assert nodes.starts_T.tolist() == [NO_TREE] * 3 + [20] * 9
    seen = [[n for n in range(9) if bits >> n & 1] for bits in nodes.seen_T[3:].tolist()]
    assert seen == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 5],
        [0, 6],
        [0, 1, 7],
        [0, 5, 8],
    ]


def test_only_what_is_kept_of_side_lines_is_moved() -> None:
    order = window_order()
    assert moved_slots(order, [(2, 3), (21, 22, 99)]).tolist() == [[48, 51], [44, 45]]
    assert moved_slots(order, [(2,), (11, 17, 99)]).tolist() == [[50], [45]]
    unmoved: tuple[tuple[int, ...], ...] = ((11, 12, 13, 14, 99), (99,), ())
    for kept in unmoved:
        assert moved_slots(order, [(2,), kept]).shape == (2, 0)
    by_chance: tuple[tuple[int, ...], ...] = ((7, 7, 7), (21, 7, 7, 7), (17, 22, 22, 22, 22))
    for kept in by_chance:
        assert moved_slots(order, [(), kept]).shape == (2, 0), "chance keeps the main line"
    assert moved_slots(order._replace(flags=DRAWS_BEST), [(), (21, 22, 99)]).shape == (2, 0)


def test_orders_of_trees_are_written_cut_and_checked() -> None:
    order = window_order()
    found = read(memoryview(to_bytes(order)))
    assert to_bytes(found) == to_bytes(order)
    assert found.backs.tolist() == order.backs.tolist()
    first, second = order.cut(1, 0)
    assert first.backs.tolist() == [1, 1, 1] and second.backs.tolist() == [1, *tree_of(8).backs]
    assert wrong_number(order, LIMITS) is None
    wrong: list[dict[str, Any]] = [
        {"backs": order.backs[:-1]},
        {"backs": order.backs * 0},
        {"backs": np.full(12, 5, dtype=np.int8)},
        {"kinds": np.full(2, PROMPT, dtype=np.int8)},
        {"flags": 4 | DRAWS_BEST},
    ]
    for each in wrong:
        assert wrong_number(order._replace(**each), LIMITS) is not None, each


# -- the law ----------------------------------------------------------------------------------------


def tree_text(target: Drawn, noise: tuple[int, ...], draft: Drawn, num_drafts: int) -> Prefix:
    """A text made of windows: each node is drawn with the noise of its depth, and the engine judges."""
    tree, text = tree_of(num_drafts), Prefix()
    while len(text) < len(noise):
        paths: list[Prefix] = [()]
        for node, (back, rank, depth) in enumerate(zip(*tree, strict=True), 1):
            parent = paths[node - back]
            value = noise[min(len(text) + depth - 1, len(noise) - 1)]
            best = draft((*text, *parent), value)
            paths.append((*parent, (best + rank) % 5))  # guesses in some order, the drawn one first
        drawn = [
            target((*text, *path), noise[len(text) + len(path)]) if len(text) + len(path) < len(noise) else 0
            for path in paths
        ]
        kept = kept_path(drawn, [path[-1] for path in paths[1:]], [1, *tree.backs])
        text = (*text, *(drawn[node] for node in kept))[: len(noise)]
    return text


@pytest.mark.parametrize("draw", [by_inverse_cdf, by_argmax])
@pytest.mark.parametrize("num_drafts", [1, 4, 6])
@pytest.mark.parametrize(("seed", "draft_seed"), [(1, 2), (5, 5)])
def test_a_tree_leaves_the_plain_text_under_every_noise(
    draw: Any, num_drafts: int, seed: int, draft_seed: int
) -> None:
    model = some_model(5, seed, NUM_VALUES)
    target, draft = drawn_from(model, draw), drawn_from(some_model(5, draft_seed, NUM_VALUES), draw)
    texts: Counter[Prefix] = Counter()
    for noise in every_noise(3):
        text = tree_text(target, noise, draft, num_drafts)
        assert text == plain_text(target, noise)
        texts[text] += 1
    law = {text: Fraction(count, NUM_VALUES**3) for text, count in texts.items()}
    assert law == law_of(target, 5, 3)
    if draw is by_inverse_cdf:
        assert law == product(model, 3)


def test_every_tree_of_a_small_vocabulary_leaves_the_plain_text() -> None:
    """Drafts that know nothing of the noise: all tokens of a tree with four nodes."""
    assert PAIRS
    target, backs = drawn_from(some_model(5, 9, NUM_VALUES), by_argmax), [1, *tree_of(4).backs]
    for tokens in itertools.product(range(5), repeat=4):
        paths: list[Prefix] = [()]
        for node, token in enumerate(tokens, 1):
            paths.append((*paths[node - backs[node]], token))
        for noise in itertools.product(range(0, NUM_VALUES, 6), repeat=4):
            drawn = [target(path, noise[len(path)]) for path in paths]
            text = tuple(drawn[node] for node in kept_path(drawn, tokens, backs))
            assert text == plain_text(target, noise)[: len(text)]


# -- guesses, and how many of them -------------------------------------------------------------------


def test_the_best_id_is_the_one_that_would_be_drawn() -> None:
    logits_SV = torch.randn(40, 60, generator=torch.Generator().manual_seed(1))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.7, "min_p": 0.02},
        {"temperature": 1.0, "logit_bias": {3: 4.0}},
    ]
    rows = [SampleRow(SamplingParams(**kinds[n % 5]), n, n + 3, 2, (), ()) for n in range(40)]
    best = best_ids(logits_SV, rows, 3)
    assert [each[0] for each in best] == sample(logits_SV, rows).ids
    assert all(len(set(each)) == 3 for each in best)
    forbidden = [row._replace(banned=(each[0],)) for row, each in zip(rows, best, strict=True)]
    plain = [n for n in range(40) if n % 5 in (0, 1, 4)]  # a filter may let another one in
    assert [best[n][1] for n in plain] == [sample(logits_SV, forbidden).ids[n] for n in plain]


def test_trees_pay_for_depth_and_not_for_nodes() -> None:
    """Where a turn of the small model takes long and a node of the step nothing, trees are worth more."""
    costs = StepCosts(((1, 1e-3), (128, 1.001e-3)), draft_s=0.2e-3)
    chains, trees = DraftLengths(costs), DraftLengths(costs, survival=survival, turns=turns_of)
    assert sum(trees.choose([(0.7, 16)])) > sum(chains.choose([(0.7, 16)])) > 0
    assert trees.choose([(0.02, 16)]) == [0]
    loaded = StepCosts(((1, 1e-3), (64, 64e-3)), draft_s=0.2e-3)
    assert DraftLengths(loaded, survival=survival, turns=turns_of).choose([(0.6, 8)] * 32) == [0] * 32
    one = Acceptance()
    for _ in range(60):
        one.update(8, 4, 4)  # the whole main line, every time
    assert one.rate > 0.95 and one.num_drafts == 480

"""Drafts change how fast a text comes and never its law: shown by enumeration, and by counting real draws.

A *law* says which tokens a window of drafts leaves. Five are judged here. The first four are those of the
literature and stand here only as references; the engine uses the fifth, for chains and trees alike:

    drawn chain        accept x ~ q with probability min(1, p/q), else draw from max(p - q, 0)
    fixed chain        accept x with probability p(x), else draw from p without x
    drawn children     as the drawn chain for one child after the other; a refused one is taken out of q
    fixed children     draw t ~ p once; descend if t is among the children
    shared noise       each position has its noise; draw every node with the noise of its depth, and keep the
                       path on which what was drawn is what was drafted

Everything is exact: probabilities are fractions, noise takes few values, and every case is visited. A window
that leaves few tokens is completed by the target's own law, and what comes out must be the product of the
target's conditionals, for drafts of any quality.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache

import pytest
import torch

from infer.execution.host_sampling import num_kept
from infer.kernels.sampling.sample_line import SampleLine
from infer.kernels.sampling.sample_rows import sample_rows_reference
from infer.kernels.sampling.sample_state import SampleState, enter_rows_reference
from infer.sampling.params import SamplingParams
from infer.sampling.sampler import SampleRow, sample
from tests.support.thinned import thinned
from tests.unit.sampling.sampling_rows import chi_square_p_value

Prefix = tuple[int, ...]
Dist = tuple[Fraction, ...]
Model = Callable[[Prefix], Dist]
Law = dict[Prefix, Fraction]  # probability of each text
ONE = Fraction(1)


def some_model(vocab_size: int, seed: int, denominator: int = 24, num_impossible: int = 0) -> Model:
    """A model whose probabilities are multiples of 1 / denominator and depend on the whole prefix."""

    @cache
    def model(prefix: Prefix) -> Dist:
        source = random.Random(repr((seed, prefix)))
        possible = source.sample(range(vocab_size), vocab_size - num_impossible)
        counts = Counter(possible) + Counter(source.choices(possible, k=denominator - len(possible)))
        return tuple(Fraction(counts[token], denominator) for token in range(vocab_size))

    return model


def normalised(weights: Sequence[Fraction]) -> Dist:
    total = sum(weights, Fraction(0))
    return tuple(weight / total for weight in weights)


def without(dist: Dist, token: int) -> Dist:
    return normalised([Fraction(0) if each == token else weight for each, weight in enumerate(dist)])


def residual(p: Dist, q: Dist) -> Dist:
    """What is left of p where q took its share; p itself if nothing is, which has no probability then."""
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return normalised(rest) if any(rest) else p


def product(model: Model, length: int, prefix: Prefix = ()) -> Law:
    """The law of the model's own texts that begin with a prefix."""
    law = {prefix: ONE}
    for _ in range(length - len(prefix)):
        law = {(*text, x): w * p for text, w in law.items() for x, p in enumerate(model(text)) if p}
    return law


def completed(windows: Mapping[Prefix, Fraction], model: Model, length: int) -> Law:
    """The law of texts that begin with a window's tokens and go on by the model's law."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for window, weight in windows.items():
        for text, rest in product(model, length, window[:length]).items():
            law[text] += weight * rest
    return dict(law)


# -- the laws of the literature, as references ------------------------------------------------------


def chain_law(target: Model, draft: Model, num_drafts: int, *, resample: bool = True) -> Law:
    """Leviathan et al. and Chen et al. 2023; without resampling it is a common mistake."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for drafts, weight in product(draft, num_drafts).items():
        for place, x in enumerate(drafts):
            kept = drafts[:place]
            p, q = target(kept), draft(kept)
            accepted = min(ONE, p[x] / q[x])
            for y, chance in enumerate(residual(p, q) if resample else p):
                law[(*kept, y)] += weight * (1 - accepted) * chance
            weight *= accepted
        for y, chance in enumerate(target(drafts)):
            law[(*drafts, y)] += weight * chance
    return {text: weight for text, weight in law.items() if weight}


def fixed_chain_law(target: Model, drafts: Prefix) -> Law:
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    weight = ONE
    for place, x in enumerate(drafts):
        kept = drafts[:place]
        p = target(kept)
        if p[x] < 1:
            for y, chance in enumerate(without(p, x)):
                law[(*kept, y)] += weight * (1 - p[x]) * chance
        weight *= p[x]
    for y, chance in enumerate(target(drafts)):
        law[(*drafts, y)] += weight * chance
    return {text: weight for text, weight in law.items() if weight}


class Shape(tuple["Shape", ...]):
    """A tree of drafts without its tokens: the shapes of its children, in the order of trying them."""

    @property
    def num_nodes(self) -> int:
        return sum(1 + child.num_nodes for child in self)

    @property
    def depth(self) -> int:
        return max((1 + child.depth for child in self), default=0)


LEAF = Shape()
TREES = [
    Shape([LEAF]),
    Shape([LEAF, LEAF, LEAF]),
    Shape([Shape([LEAF, LEAF]), LEAF]),
    Shape([Shape([LEAF, LEAF]), Shape([LEAF, LEAF])]),
    Shape([Shape([Shape([LEAF]), LEAF]), LEAF, LEAF]),
]


def drawn_tree_law(target: Model, draft: Model, shape: Shape, kept: Prefix = ()) -> Law:
    """Children drawn without replacement (Jeon et al. 2024, Chen et al. 2024), over all draws of them."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)

    def judge(children: tuple[Shape, ...], p: Dist, q: Dist | None, weight: Fraction) -> None:
        if not children or q is None:
            for y, chance in enumerate(p):
                law[(*kept, y)] += weight * chance
            return
        for x, drawn in enumerate(q):
            if not drawn:
                continue
            accepted = min(ONE, p[x] / drawn)
            if accepted:
                for text, rest in drawn_tree_law(target, draft, children[0], (*kept, x)).items():
                    law[text] += weight * drawn * accepted * rest
            if accepted < 1:
                left = None if drawn == 1 else without(q, x)
                judge(children[1:], residual(p, q), left, weight * drawn * (1 - accepted))

    judge(tuple(shape), target(kept), draft(kept), ONE)
    return {text: weight for text, weight in law.items() if weight}


def top_children(dist: Dist, count: int) -> list[int]:
    return sorted(range(len(dist)), key=lambda token: (-dist[token], token))[:count]


def fixed_tree_law(target: Model, draft: Model, shape: Shape, kept: Prefix = ()) -> Law:
    """Children are the draft's likeliest tokens, as in EAGLE-2."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    p = target(kept)
    children = dict(zip(top_children(draft(kept), len(shape)), shape, strict=True))
    for y, chance in enumerate(p):
        if not chance:
            continue
        below = fixed_tree_law(target, draft, children[y], (*kept, y)) if y in children else {(*kept, y): ONE}
        for text, rest in below.items():
            law[text] += chance * rest
    return dict(law)


def wrong_tree_law(target: Model, draft: Model, num_children: int) -> Law:
    """The draft's likeliest tokens judged as if they had been drawn, which they were not."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    p, q, weight = target(()), draft(()), ONE
    for x in top_children(q, num_children):
        accepted = min(ONE, p[x] / q[x]) if q[x] else Fraction(0)
        law[(x,)] += weight * accepted
        weight, p = weight * (1 - accepted), residual(p, q)
    for y, chance in enumerate(p):
        law[(y,)] += weight * chance
    return {text: weight for text, weight in law.items() if weight}


PAIRS = [  # vocabulary, seeds of target and draft: two that have nothing in common, and one model twice
    pytest.param(5, 1, 2, id="5-tokens"),
    pytest.param(8, 3, 4, id="8-tokens"),
    pytest.param(6, 5, 5, id="self"),
]


@pytest.mark.parametrize(("vocab_size", "seed", "draft_seed"), PAIRS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("num_impossible", [0, 2])
def test_a_drawn_chain_has_the_law_of_the_target(
    vocab_size: int, seed: int, draft_seed: int, num_drafts: int, num_impossible: int
) -> None:
    target = some_model(vocab_size, seed, num_impossible=num_impossible)
    draft = some_model(vocab_size, draft_seed, num_impossible=num_impossible)
    law = chain_law(target, draft, num_drafts)
    assert completed(law, target, num_drafts + 1) == product(target, num_drafts + 1)
    if seed == draft_seed:
        assert all(len(text) == num_drafts + 1 for text in law)


def test_a_chain_that_does_not_resample_has_another_law() -> None:
    target, draft = some_model(5, 1), some_model(5, 2)
    assert completed(chain_law(target, draft, 2, resample=False), target, 3) != product(target, 3)


@pytest.mark.parametrize("vocab_size", [5, 6])
def test_every_fixed_chain_has_the_law_of_the_target(vocab_size: int) -> None:
    target = some_model(vocab_size, 7, num_impossible=1)
    for drafts in itertools.product(range(vocab_size), repeat=2):
        assert completed(fixed_chain_law(target, drafts), target, 3) == product(target, 3)


@pytest.mark.parametrize(("vocab_size", "seed", "draft_seed"), PAIRS)
@pytest.mark.parametrize("shape", TREES, ids=str)
def test_children_without_replacement_have_the_law_of_the_target(
    vocab_size: int, seed: int, draft_seed: int, shape: Shape
) -> None:
    assert shape.num_nodes <= 6
    target, draft = some_model(vocab_size, seed), some_model(vocab_size, draft_seed)
    law = drawn_tree_law(target, draft, shape)
    assert completed(law, target, shape.depth + 1) == product(target, shape.depth + 1)


def test_a_draft_with_fewer_tokens_than_children() -> None:
    target, draft = some_model(5, 1), some_model(5, 2, num_impossible=3)
    law = drawn_tree_law(target, draft, Shape([LEAF, Shape([LEAF]), LEAF]))
    assert completed(law, target, 3) == product(target, 3)


@pytest.mark.parametrize(("vocab_size", "seed", "draft_seed"), PAIRS)
@pytest.mark.parametrize("shape", TREES, ids=str)
def test_the_likeliest_children_have_the_law_of_the_target(
    vocab_size: int, seed: int, draft_seed: int, shape: Shape
) -> None:
    target, draft = some_model(vocab_size, seed), some_model(vocab_size, draft_seed)
    law = fixed_tree_law(target, draft, shape)
    assert completed(law, target, shape.depth + 1) == product(target, shape.depth + 1)


def test_the_likeliest_children_must_not_be_judged_as_drawn() -> None:
    target, draft = some_model(5, 1), some_model(5, 2)
    assert wrong_tree_law(target, draft, 2) != product(target, 1)


# -- shared noise -----------------------------------------------------------------------------------

Draw = Callable[[Dist, int], int]  # the token of a distribution at a value of the noise
Drawn = Callable[[Prefix, int], int]  # the token of a model after a prefix at a value of the noise
NUM_VALUES = 12  # equally likely values that the noise of a position can take


def by_inverse_cdf(dist: Dist, value: int) -> int:
    """The token whose stretch of [0, 1) the noise hits; exact for multiples of 1 / NUM_VALUES."""
    reached = itertools.accumulate(dist)
    return next(token for token, end in enumerate(reached) if Fraction(value, NUM_VALUES) < end)


def by_argmax(dist: Dist, value: int) -> int:
    """The token of the largest product of probability and noise, as Gumbel-max does with logarithms."""
    source = random.Random(value)
    noise = [source.randint(1, 1000) for _ in dist]
    return max(range(len(dist)), key=lambda token: (dist[token] * noise[token], -token))


def drawn_from(model: Model, draw: Draw) -> Drawn:
    return cache(lambda prefix, value: draw(model(prefix), value))


def law_of(drawn: Drawn, vocab_size: int, length: int) -> Law:
    """The law of plain texts under noise: the product of the distributions that are really drawn."""

    def model(prefix: Prefix) -> Dist:
        counts = Counter(drawn(prefix, value) for value in range(NUM_VALUES))
        return tuple(Fraction(counts[token], NUM_VALUES) for token in range(vocab_size))

    return product(model, length)


def plain_text(target: Drawn, noise: Sequence[int]) -> Prefix:
    text: Prefix = ()
    for value in noise:
        text = (*text, target(text, value))
    return text


def chain_text(
    target: Drawn, noise: Sequence[int], drafts_of: Callable[[Prefix], Prefix]
) -> tuple[Prefix, list[int]]:
    """A text made of windows, and how many tokens each window left: `num_kept` is the engine's."""
    text: Prefix = ()
    lengths = []
    while len(text) < len(noise):
        drafts = drafts_of(text)[: len(noise) - len(text) - 1]
        drawn = [target((*text, *drafts[:i]), noise[len(text) + i]) for i in range(len(drafts) + 1)]
        lengths.append(num_kept(drawn, drafts))
        text = (*text, *drawn[: lengths[-1]])
    return text, lengths


def tree_window(
    target: Drawn,
    noise: Sequence[int],
    children_of: Callable[[Prefix, int], list[int]],
    shape: Shape,
    text: Prefix,
) -> Prefix:
    """The text after one tree was judged: the walk follows what was drawn while it is what was drafted."""
    drawn = target(text, noise[len(text)])
    children = children_of(text, len(shape))
    text = (*text, drawn)
    if drawn not in children or len(text) == len(noise):
        return text
    return tree_window(target, noise, children_of, shape[children.index(drawn)], text)


def every_noise(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(NUM_VALUES), repeat=length)


DRAWS = [pytest.param(by_inverse_cdf, id="inverse-cdf"), pytest.param(by_argmax, id="argmax")]


def test_inverse_cdf_draws_the_distribution_itself() -> None:
    target = some_model(5, 1, NUM_VALUES)
    assert law_of(drawn_from(target, by_inverse_cdf), 5, 3) == product(target, 3)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(("vocab_size", "seed", "draft_seed"), PAIRS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_a_chain_under_shared_noise_is_the_plain_text(
    draw: Draw, vocab_size: int, seed: int, draft_seed: int, num_drafts: int
) -> None:
    model = some_model(vocab_size, seed, NUM_VALUES)
    target, draft = drawn_from(model, draw), drawn_from(some_model(vocab_size, draft_seed, NUM_VALUES), draw)
    texts: Counter[Prefix] = Counter()
    for noise in every_noise(3):

        def drafts_of(text: Prefix, noise: tuple[int, ...] = noise) -> Prefix:
            drafts: Prefix = ()
            for value in noise[len(text) : len(text) + num_drafts]:
                drafts = (*drafts, draft((*text, *drafts), value))
            return drafts

        text, lengths = chain_text(target, noise, drafts_of)
        assert text == plain_text(target, noise)
        if seed == draft_seed:  # a model never refuses what it drafted itself
            assert lengths == ([2, 1] if num_drafts == 1 else [3])
        texts[text] += 1
    law = {text: Fraction(count, NUM_VALUES**3) for text, count in texts.items()}
    assert law == law_of(target, vocab_size, 3)
    if draw is by_inverse_cdf:
        assert law == product(model, 3)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_fixed_chain_under_noise_is_the_plain_text(draw: Draw) -> None:
    """Drafts that know nothing of the noise, or all of it: each chain meets each noise."""
    target = drawn_from(some_model(5, 9, NUM_VALUES), draw)
    for drafts in itertools.product(range(5), repeat=2):

        def drafts_of(text: Prefix, drafts: Prefix = drafts) -> Prefix:
            return drafts

        for noise in every_noise(3):
            assert chain_text(target, noise, drafts_of)[0] == plain_text(target, noise)


@pytest.mark.parametrize(
    ("draw", "pair", "shape", "children"),
    thinned(
        [draw.values[0] for draw in DRAWS],
        [pair.values for pair in PAIRS],
        TREES,
        ("likeliest", "noisy"),
        keep=2,
    ),
)
def test_a_tree_under_shared_noise_is_the_plain_text(
    draw: Draw, pair: tuple[int, int, int], shape: Shape, children: str
) -> None:
    vocab_size, seed, draft_seed = pair
    model, draft_model = (
        some_model(vocab_size, seed, NUM_VALUES),
        some_model(vocab_size, draft_seed, NUM_VALUES),
    )
    target, draft = drawn_from(model, draw), drawn_from(draft_model, draw)
    likeliest = cache(lambda text: top_children(draft_model(text), vocab_size))
    texts: Counter[Prefix] = Counter()
    for noise in every_noise(3):

        def children_of(text: Prefix, count: int, noise: tuple[int, ...] = noise) -> list[int]:
            if children == "likeliest" or not count or len(text) == len(noise):
                return likeliest(text)[:count]
            picked = draft(text, noise[len(text)])  # the token that the noise picks comes first
            return [picked, *(token for token in likeliest(text) if token != picked)][:count]

        text: Prefix = ()
        while len(text) < 3:
            text = tree_window(target, noise, children_of, shape, text)
        assert text == plain_text(target, noise)
        texts[text] += 1
    law = {text: Fraction(count, NUM_VALUES**3) for text, count in texts.items()}
    assert law == law_of(target, vocab_size, 3)


# -- the engine's sampler ---------------------------------------------------------------------------

NUM_CLASSES, LENGTH, NUM_DRAFTS = 3, 3, 2
PARAMS = [
    pytest.param(SamplingParams(temperature=0.8), id="temperature"),
    pytest.param(SamplingParams(top_p=0.8), id="top-p", marks=pytest.mark.slow),
    pytest.param(SamplingParams(temperature=1.3, top_k=40, top_p=0.9), id="top-k and top-p"),
]


def context_of(token: int | None) -> int:
    """The line of the logits after a token: they depend on its class only; the last line begins a text."""
    return NUM_CLASSES if token is None else token % NUM_CLASSES


def logits_table(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randn(NUM_CLASSES + 1, vocab_size, generator=generator) * 4.0


def expected_law(table: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The probability of each text's classes, from the definition of the filters in float64."""
    kept = torch.softmax(table.double() / params.temperature, dim=-1)
    ranked, order = kept.sort(dim=-1, descending=True)
    if params.top_k:
        ranked[:, params.top_k :] = 0
    ranked[ranked.cumsum(-1) - ranked >= params.top_p * ranked.sum(-1, keepdim=True)] = 0
    kept = torch.zeros_like(kept).scatter(1, order, ranked)
    kept /= kept.sum(-1, keepdim=True)
    classes = torch.arange(kept.shape[1]) % NUM_CLASSES
    step = torch.stack([kept[:, classes == each].sum(-1) for each in range(NUM_CLASSES)], dim=1)
    first, after = step[NUM_CLASSES], step[:NUM_CLASSES]
    return (first[:, None, None] * after[:, :, None] * after[None]).flatten()


Drafter = Callable[[int, list[int]], list[int]]  # the drafts of a sequence, given its text
Sampler = Callable[
    [torch.Tensor, Sequence[tuple[int, int]]], list[int]
]  # ids, given (seed, position) of rows


def texts_in_windows(
    table: torch.Tensor, sampler: Sampler, drafter: Drafter, seeds: range
) -> tuple[list[list[int]], float]:
    """The text of each seed, made of windows judged by `num_kept`, and the share of drafts that were kept."""
    texts: dict[int, list[int]] = {seed: [] for seed in seeds}
    waiting, num_drafts, num_accepted = list(seeds), 0, 0
    while waiting:
        size = max(1, 2**18 // table.shape[1])  # sequences whose logits fit into a cache together
        batch, waiting = waiting[:size], waiting[size:]
        windows, places, contexts = [], [], []
        for seed in batch:
            text = texts[seed]
            drafts = drafter(seed, text)[: LENGTH - len(text) - 1]
            windows.append(drafts)
            places += [(seed, len(text) + place) for place in range(len(drafts) + 1)]
            contexts += [context_of(each) for each in [text[-1] if text else None, *drafts]]
        ids = iter(sampler(table[contexts], places))
        for seed, drafts in zip(batch, windows, strict=True):
            drawn = list(itertools.islice(ids, len(drafts) + 1))
            count = num_kept(drawn, drafts)
            texts[seed] += drawn[:count]
            num_drafts, num_accepted = num_drafts + len(drafts), num_accepted + count - 1
            if len(texts[seed]) < LENGTH:
                waiting.append(seed)
    return [texts[seed] for seed in seeds], num_accepted / max(num_drafts, 1)


def host_sampler(params: SamplingParams) -> Sampler:
    return lambda logits, places: (
        sample(logits, [SampleRow(params, seed, position, 0, ()) for seed, position in places]).ids
    )


def device_sampler(params: SamplingParams) -> Sampler:
    """The specification of the kernel that samples on a GPU, with the state that it reads there."""

    def sampler(logits: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[int]:
        state = SampleState.empty(len(places), "cpu")
        lines = [
            SampleLine(
                row, top_k=params.top_k, seed=seed, temperature=params.temperature, top_p=params.top_p
            ).pack()
            for row, (seed, _) in enumerate(places)
        ]
        entries = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.int64).view(len(places), -1)
        enter_rows_reference(state, entries)
        positions = torch.tensor([position for _, position in places])
        ids = sample_rows_reference(logits, state, torch.arange(len(places)), positions)
        return [int(token) for token in ids]

    return sampler


def no_drafts(seed: int, text: list[int]) -> list[int]:
    return []


def likely_drafts(table: torch.Tensor) -> Drafter:
    """Drafts from the likeliest tokens, by a noise of their own: right now and then."""
    likeliest = [line.topk(4).indices.tolist() for line in table]

    def drafter(seed: int, text: list[int]) -> list[int]:
        source, drafts = random.Random(seed * LENGTH + len(text)), list[int]()
        for _ in range(NUM_DRAFTS):
            last = [*text, *drafts][-1] if text or drafts else None
            drafts.append(source.choice(likeliest[context_of(last)]))
        return drafts

    return drafter


def knowing_drafts(plain: Mapping[int, list[int]], vocab_size: int) -> Drafter:
    """Drafts that know the text to come, and lie at a fifth of the places: a law could be bent by these."""

    def drafter(seed: int, text: list[int]) -> list[int]:
        source = random.Random(seed * LENGTH + len(text))
        right = plain[seed][len(text) : len(text) + NUM_DRAFTS]
        return [source.randrange(vocab_size) if source.random() < 0.2 else token for token in right]

    return drafter


def counts_of(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    bins = [
        sum(token % NUM_CLASSES * NUM_CLASSES ** (LENGTH - 1 - i) for i, token in enumerate(text))
        for text in texts
    ]
    return torch.bincount(torch.tensor(bins), minlength=NUM_CLASSES**LENGTH)


@pytest.mark.parametrize("params", PARAMS)
def test_windows_of_the_sampler_have_the_law_of_the_target(params: SamplingParams) -> None:
    table, seeds = logits_table(1000), range(3000)
    expected, sampler = expected_law(table, params), host_sampler(params)
    plain, _ = texts_in_windows(table, sampler, no_drafts, seeds)
    assert chi_square_p_value(counts_of(plain), expected) > 1e-4
    knowing = knowing_drafts(dict(zip(seeds, plain, strict=True)), 1000)
    for drafter, low, high in ((knowing, 0.6, 0.9), (likely_drafts(table), 0.05, 0.5)):
        texts, accepted = texts_in_windows(table, sampler, drafter, seeds[:1000])
        assert texts == plain[:1000]  # so they have the same law
        assert low < accepted < high


def test_greedy_windows_are_the_greedy_text() -> None:
    table, sampler = logits_table(1000), host_sampler(SamplingParams(temperature=0.0))
    plain, _ = texts_in_windows(table, sampler, no_drafts, range(20))
    assert plain == [plain[0]] * 20
    assert texts_in_windows(table, sampler, likely_drafts(table), range(20))[0] == plain


@pytest.mark.parametrize("params", PARAMS)
def test_windows_of_the_device_sampler_are_those_of_the_host(params: SamplingParams) -> None:
    table, seeds = logits_table(1000), range(100)
    drafter = likely_drafts(table)
    host = texts_in_windows(table, host_sampler(params), drafter, seeds)
    assert texts_in_windows(table, device_sampler(params), drafter, seeds) == host


def test_a_law_that_favours_drafts_would_be_found() -> None:
    """Keeping one refused draft in ten shows in the counts of the quick test above."""
    params, table, seeds = SamplingParams(temperature=0.8), logits_table(1000), range(6000)
    drafter, source = likely_drafts(table), random.Random(0)
    texts, _ = texts_in_windows(table, host_sampler(params), no_drafts, seeds)
    for seed, text in zip(seeds, texts, strict=True):
        if source.random() < 0.1:
            text[0] = drafter(seed, [])[0]
    assert chi_square_p_value(counts_of(texts), expected_law(table, params)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
def test_a_large_vocabulary_has_the_law_of_the_target(params: SamplingParams) -> None:
    table, seeds = logits_table(32_000), range(20_000)  # about 100,000 draws
    texts, accepted = texts_in_windows(table, host_sampler(params), likely_drafts(table), seeds)
    assert 0.05 < accepted < 0.5
    assert chi_square_p_value(counts_of(texts), expected_law(table, params)) > 1e-4

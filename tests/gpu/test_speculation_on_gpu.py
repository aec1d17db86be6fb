"""Windows of drafts in CUDA graphs against single steps, on a GPU.

With `deterministic` a row of a window is computed as it would be alone: tokens and logprobs are equal bits.
Otherwise kernels add up in another order for another number of rows, so that of two tokens that are about
equally likely either may come. The test looks at how likely they were where two texts part.

`Told` drafts what a run without drafts has said, up to some place of each window, and something else behind
it: windows of 2 to 17 tokens are kept whole, in part and not at all, at any temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.config.speculation import MAX_DRAFTS
from infer.engine.speculation import Speculation
from infer.execution.gpu.device import GpuDevice
from infer.speculative.proposer import Wish
from scripts.make_checkpoint import Sizes, make_checkpoint
from tests.gpu.graphs import FEW_SIZES

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 512
MAX_TOKENS = 40
TOLERANCE = 0.15  # between the logprobs of two tokens in bfloat16, where either may come
EXPERT_TOLERANCE = 0.5  # which experts a token gets may change where two are nearly as likely
PROMPTS = [[(7 * i + j) % 200 + 10 for j in range(3 + 5 * i)] for i in range(6)]
FAMILIES = ("qwen3", "gemma3", "mistral", "mixtral")  # one table, several, all with windows, experts
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "seed": 3, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 29))},
    {"temperature": 0.0, "max_tokens": 7},
    {"temperature": 0.9, "min_p": 0.02, "seed": 4, "logit_bias": {30: 2.0, 31: -2.0}},
]
ALWAYS: dict[str, Any] = {"adaptive_speculation": False, "num_speculative_tokens": MAX_DRAFTS}
Numbers = list[list[tuple[int, float]]]  # tokens and logprobs of each answer


def params_of(**more: Any) -> list[SamplingParams]:
    usual: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2}
    return [SamplingParams(**(usual | kind | more)) for kind in KINDS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("speculation")

    @functools.cache
    def make(family: str) -> str:
        sizes = Sizes(hidden_size=256, vocab_size=VOCAB_SIZE)  # heads of 64, and windows of 16 tokens
        make_checkpoint(family, root / family, sizes=sizes, dtype="bfloat16")
        return str(root / family)

    return make


def make_llm(directory: str, **knobs: Any) -> LLM:
    return LLM(directory, device="cuda", **(FEW_SIZES | {"dtype": "bfloat16"} | knobs))


def speculation_of(llm: LLM) -> Speculation:
    assert llm.engine.speculation is not None
    return llm.engine.speculation


def numbers(llm: LLM, params: Seq[SamplingParams], prompts: Seq[list[int]] = PROMPTS) -> Numbers:
    """Tokens and logprobs of prompts that are served together; the books balance afterwards."""
    found = []
    for answer in llm.generate(list(prompts), list(params)):
        rows = answer.outputs[0].logprobs or ()
        found.append([(token, row.logprob) for token, row in zip(answer.token_ids, rows, strict=True)])
    assert llm.engine.scheduler.pool.audit_blocks() == []
    return found


class Told:
    """Drafts the text of an earlier run, right up to a place that moves from window to window."""

    def __init__(self, texts: Seq[Seq[int]], places: Seq[int] = (MAX_DRAFTS, 0, 1, 3, 7, MAX_DRAFTS)) -> None:
        self._texts, self._places = [list(text) for text in texts], places
        self._num_windows = 0

    def propose(self, wishes: Seq[Wish]) -> list[Seq[int]]:
        """The rest of the text that a wish is the start of, but for one token."""
        return [self._drafts(wish) for wish in wishes]

    def _drafts(self, wish: Wish) -> Seq[int]:
        known = wish.tokens.tolist()
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        drafts = text[len(known) :][: wish.num_drafts]
        place = self._places[self._num_windows % len(self._places)]
        self._num_windows += 1
        if place < len(drafts):
            drafts[place] = (drafts[place] + 1) % VOCAB_SIZE
        return drafts

    def has_match(self, wish: Wish) -> bool:
        """Always: the text is known."""
        return True

    def finish(self, wish: Wish) -> None:
        """Nothing is kept."""


def tell(llm: LLM, answers: Numbers, **more: Any) -> Speculation:
    """Let an engine draft what is known to be right."""
    texts = [
        [*prompt, *(token for token, _ in answer)] for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    speculation = speculation_of(llm)
    speculation._proposer = Told(texts, **more)
    return speculation


@pytest.mark.parametrize("use_cuda_graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_windows_are_the_same_bits(
    family: str, use_cuda_graphs: bool, checkpoints: Callable[[str], str]
) -> None:
    """Whole batches and single sequences, drafts that are right and wrong at every place."""
    knobs: dict[str, Any] = {"deterministic": True, "use_cuda_graphs": use_cuda_graphs}
    directory, params = checkpoints(family), params_of()
    with make_llm(directory, **knobs) as llm:
        assert isinstance(llm.engine.device, GpuDevice)
        expected = numbers(llm, params)
    with make_llm(directory, speculative_method="ngram", **ALWAYS, **knobs) as llm:
        speculation = tell(llm, expected)
        assert numbers(llm, params) == expected
        for number in range(len(PROMPTS)):
            alone = numbers(llm, [params[number]], [PROMPTS[number]])
            assert alone == [expected[number]], number
        by_length = speculation.totals.by_length
        assert by_length[0] > 0 and sum(by_length[1:-1]) > 0 and len(by_length) - 1 >= MAX_DRAFTS, by_length


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_drafts_that_states_have_not_seen(family: str, checkpoints: Callable[[str], str]) -> None:
    """Kept drafts go into the states of linear attention a step later; float32 leaves few ties."""
    directory, params = checkpoints(family), params_of()
    with make_llm(directory, dtype="float32") as llm:
        expected = numbers(llm, params)
    with make_llm(directory, dtype="float32", speculative_method="ngram", **ALWAYS) as llm:
        speculation = tell(llm, expected)
        for _ in range(2):  # the second time from cached states
            found = numbers(llm, params)
            assert [[id_ for id_, _ in row] for row in found] == [[id_ for id_, _ in row] for row in expected]
        by_length = speculation.totals.by_length
        assert by_length[0] > 0 and sum(by_length[1:]) > 0, by_length


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deterministic_model_drafts_for_itself_without_a_fault(
    family: str, checkpoints: Callable[[str], str]
) -> None:
    directory, params = checkpoints(family), params_of()
    with make_llm(directory, deterministic=True) as llm:
        expected = numbers(llm, params)
    for count in (1, 4, 7):
        knobs = ALWAYS | {"num_speculative_tokens": count, "draft_model": directory, "deterministic": True}
        with make_llm(directory, **knobs) as llm:
            assert numbers(llm, params) == expected, count
            assert numbers(llm, params) == expected, "prompts that are cached"
            totals = speculation_of(llm).totals
        assert totals.num_accepted == totals.num_drafts > 50, count


def test_windows_of_every_size(checkpoints: Callable[[str], str]) -> None:
    """Of 2 to 17 tokens, alone and beside each other: a request says how many drafts it gets."""
    directory = checkpoints("qwen3")
    sizes = range(MAX_DRAFTS + 1)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in sizes]
    kinds = [KINDS[number % len(KINDS)] for number in sizes]
    usual: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(**(usual | kind | {"num_speculative_tokens": number}))
        for number, kind in zip(sizes, kinds, strict=True)
    ]
    with make_llm(directory, deterministic=True) as llm:
        once = numbers(llm, params_of())
    expected = [once[number % len(PROMPTS)] for number in sizes]
    with make_llm(directory, deterministic=True, speculative_method="ngram", **ALWAYS) as llm:
        tell(llm, once, places=(MAX_DRAFTS,))
        assert numbers(llm, params, prompts) == expected
        for number in sizes:
            before = speculation_of(llm).totals.num_windows
            assert numbers(llm, [params[number]], [prompts[number]]) == [expected[number]], number
            assert (speculation_of(llm).totals.num_windows > before) is (number > 0)


@pytest.mark.parametrize(
    "more",
    [
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int4"},
        {"quantization": "fp8"},
        {"block_size": 16, "num_blocks": 14, "preemption": "swap", "swap_blocks": 40, "max_batch_size": 4},
        {"block_size": 16, "num_blocks": 14, "preemption": "recompute", "max_batch_size": 4},
        {"use_overlap": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_windows_with_codes_and_in_small_caches(
    family: str, more: dict[str, Any], checkpoints: Callable[[str], str]
) -> None:
    if family == "gemma3" and "num_blocks" in more:
        more = more | {"num_blocks": 60}  # it has several tables
    directory, params = checkpoints(family), params_of()
    knobs: dict[str, Any] = {"deterministic": True} | more
    with make_llm(directory, **knobs) as llm:
        expected = numbers(llm, params)
    with make_llm(directory, speculative_method="ngram", **ALWAYS, **knobs) as llm:
        speculation = tell(llm, expected)
        for _ in range(2):
            assert numbers(llm, params) == expected
        assert speculation.totals.num_accepted > 20


@pytest.mark.parametrize("method", ["told", "self", "ngram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_windows_part_from_single_steps_only_where_tokens_are_alike(
    family: str, method: str, checkpoints: Callable[[str], str]
) -> None:
    """Greedy, in the kernels and graphs that a server has by default."""
    directory = checkpoints(family)
    params = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=8) for _ in PROMPTS
    ]
    with make_llm(directory) as llm:
        known = llm.generate(PROMPTS, params)
        expected = [[(token, 0.0) for token in answer.token_ids] for answer in known]
    knobs = ALWAYS | ({"draft_model": directory} if method == "self" else {"speculative_method": "ngram"})
    with make_llm(directory, **knobs) as llm:
        if method == "told":
            tell(llm, expected)
        found = llm.generate(PROMPTS, params)
        totals = speculation_of(llm).totals
    for answer, wanted in zip(found, known, strict=True):
        rows = wanted.outputs[0].logprobs or ()
        for place, (token, right, row) in enumerate(
            zip(answer.token_ids, wanted.token_ids, rows, strict=True)
        ):
            if token != right:
                likely = dict(row.top)
                assert token in likely, f"at {place}: {token} was not among the likeliest, {likely}"
                tolerance = EXPERT_TOLERANCE if family == "mixtral" else TOLERANCE
                assert likely[right] - likely[token] < tolerance, f"at {place}: {likely}"
                break
    assert method == "ngram" or totals.num_accepted > 50, "a random text seldom repeats itself"


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_steps_overlap_beside_speculation(method: str, checkpoints: Callable[[str], str]) -> None:
    """Text that does not repeat itself: steps are launched ahead as without, and the text is the same."""
    directory, params = checkpoints("qwen3"), params_of()
    with make_llm(directory, deterministic=True) as llm:
        expected = numbers(llm, params)
    with make_llm(directory, deterministic=True, speculative_method=method) as llm:
        assert llm.engine._steps_ahead > 0
        most, step = [0], llm.engine.step

        def step_and_look() -> Any:
            outputs = step()
            most.append(len(llm.engine._flights))
            return outputs

        llm.engine.step = step_and_look  # type: ignore[method-assign]
        for _ in range(3):
            assert numbers(llm, params) == expected
        assert max(most) == llm.engine._steps_ahead


def test_adaptive_windows_of_a_machine_that_was_measured(checkpoints: Callable[[str], str]) -> None:
    """With this GPU's own seconds of a step, and drafts that are right, wrong, and right again."""
    directory, params = checkpoints("qwen3"), params_of()
    with make_llm(directory, deterministic=True) as llm:
        expected = numbers(llm, params)
    with make_llm(directory, deterministic=True, speculative_method="ngram") as llm:
        costs = speculation_of(llm).costs
        assert costs.pairs[0][0] == 1 and costs.gap_s > 0
        for places in ((MAX_DRAFTS,), (0,), (0, 1, 2), (MAX_DRAFTS,)):
            tell(llm, expected, places=places)
            assert numbers(llm, params) == expected, places

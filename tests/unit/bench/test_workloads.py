from __future__ import annotations

import hashlib
import random

import pytest

from infer.bench.workloads import OFFLINE, SERVING, fit, make_workload, read_names, vary
from infer.errors import ConfigError


def test_the_specified_workloads_are_all_there() -> None:
    assert list(SERVING) == [
        "baseline",
        "continuous_batching",
        "paged_attention",
        "chunked_prefill",
        "prefix_caching",
        "w1_single",
        "w2_mixed",
        "w3_shared_prefix",
        "agent_session",
        "chat_serving",
    ]


@pytest.mark.parametrize("name", SERVING)
def test_a_seed_decides_the_whole_workload(name: str) -> None:
    assert make_workload(name, seed=1) == make_workload(name, seed=1)
    assert make_workload(name, seed=1) != make_workload(name, seed=2)


def test_sizes_are_as_specified() -> None:
    def shape(name: str) -> tuple[int, str, int, float]:
        workload = make_workload(name)
        return (
            workload.num_requests,
            workload.arrival.kind,
            workload.arrival.concurrency,
            workload.arrival.rate,
        )

    assert shape("baseline") == (10, "closed", 1, 0)
    assert shape("continuous_batching") == (32, "open", 0, 4)
    assert shape("paged_attention") == (48, "open", 0, 0)
    assert shape("chunked_prefill") == (48, "open", 0, 6)
    assert shape("prefix_caching") == (48, "open", 0, 8)
    assert shape("w1_single") == (1, "closed", 1, 0)
    assert shape("w2_mixed")[0] == 16
    assert shape("w2_mixed:64") == (64, "closed", 64, 0)
    assert shape("w3_shared_prefix:64") == (64, "closed", 64, 0)


def test_three_quarters_of_chunked_prefill_are_long() -> None:
    lengths = [session.turns[0].prompt_len for session in make_workload("chunked_prefill").sessions]
    assert sum(length >= 512 for length in lengths) == 36


def test_prefix_caching_shares_1024_tokens_and_no_more() -> None:
    prompts = [session.turns[0].ids for session in make_workload("prefix_caching").sessions]
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:1028] for prompt in prompts}) == len(prompts)


def test_arrivals_of_a_poisson_process_have_its_rate() -> None:
    starts = [session.start_s for session in make_workload("prefix_caching").sessions]
    assert starts == sorted(starts)
    assert 48 / starts[-1] == pytest.approx(8, rel=0.5)


def test_presets_grow() -> None:
    sizes = [make_workload(f"agent_session:{preset}").longest for preset in ("short", "mid", "long")]
    assert sizes == sorted(sizes)
    with pytest.raises(ConfigError, match="no variant 'huge'; give chat_serving:short, chat_serving:mid"):
        make_workload("chat_serving:huge")


def test_an_unknown_name_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'baseline'"):
        make_workload("baselin")


def reference_nano() -> list[tuple[list[int], int]]:
    """As other engines' scripts write it."""
    r = random.Random(0)
    return [
        ([r.randint(0, 10000) for _ in range(r.randint(100, 1024))], r.randint(100, 1024)) for _ in range(256)
    ]


def test_nano256_is_the_list_that_all_engines_are_timed_on() -> None:
    made = [(list(s.turns[0].ids), s.turns[0].max_tokens) for s in make_workload("nano256").sessions]
    assert made == reference_nano()


# of the token ids and lengths, as JSON-like text; other engines' figures are of exactly these lists
DIGESTS = {
    "nano256": "08fdd0a3bb1c0dfa",
    "b1_256_256": "3fde47835365c421",
    "b8_256_256": "7b53b5aae8f5cd43",
    "b32_256_256": "12746d195f91f965",
    "b128_256_256": "6d1ff5d93213296d",
    "prefill_8x4096": "db54662690e3bc7e",
}


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_lists_never_change(name: str) -> None:
    made = [(list(s.turns[0].ids), s.turns[0].max_tokens) for s in make_workload(name, seed=7).sessions]
    assert hashlib.sha256(repr(made).encode()).hexdigest()[:16] == DIGESTS[name]


def test_groups_of_names() -> None:
    assert read_names("all", group="serving") == list(SERVING)
    assert read_names("all", group="offline") == read_names("peer", group="serving") == list(OFFLINE)
    assert read_names("a,b", group="serving") == ["a", "b"]


def test_a_small_model_gets_a_shorter_workload() -> None:
    whole = make_workload("w2_mixed")
    small = fit(whole, context_len=128, vocab_size=300)
    assert small.num_requests == whole.num_requests
    assert small.longest <= 128
    assert max(max(session.turns[0].ids) for session in small.sessions) < 300
    assert "shortened to" in small.about
    assert fit(whole, context_len=4096, vocab_size=20_000) is whole


def test_a_repeat_has_other_tokens_and_the_same_lengths() -> None:
    for name in ("prefix_caching", "w3_shared_prefix"):
        first = make_workload(name)
        second = vary(first, 1)
        for a, b in zip(first.sessions, second.sessions, strict=True):
            assert a.turns[0].prompt_len == b.turns[0].prompt_len
            assert a.start_s == b.start_s
            assert a.turns[0].ids[:16] != b.turns[0].ids[:16] or a.turns[0].text != b.turns[0].text
        assert len({session.turns[0].ids[:1024] for session in second.sessions}) == 1  # still shared
        assert len({session.system for session in second.sessions}) == 1
        assert vary(first, 0) is first

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from infer.engine.prefixes import prefix_hashes
from infer.errors import EngineStopped
from infer.scheduling.request import Request
from infer.server.fleet import router as router_module
from infer.server.fleet.router import (
    ADAPTER_S,
    EXPECTED_S,
    LATELY_S,
    MAX_IMBALANCE,
    MAX_LOAD,
    PREFIX_BLOCK,
    Router,
)
from tests.support.fake_client import FakeClient


def request(*prompt: int, salt: str = "") -> Request:
    return Request(request_id="r", prompt=prompt, cache_salt=salt)


def prompt_of(number: int, num_blocks: int = 2) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + num_blocks * PREFIX_BLOCK))


def set_load(client: FakeClient, num_running: int, **stats: Any) -> None:
    step = client.snapshot.num_steps + 1
    client.snapshot = replace(client.snapshot, num_running=num_running, num_steps=step, **stats)


def cache(client: FakeClient, *prompt: int, salt: str = "") -> None:
    """Let a replica say that it has a prompt in its cache."""
    client.prefixes.update(prefix_hashes(request(*prompt, salt=salt), PREFIX_BLOCK, 512))


def test_a_single_replica_gets_everything() -> None:
    only = FakeClient()
    assert Router().pick(request(1, 2, 3), [only]) is only


def test_a_burst_between_two_steps_is_spread_evenly() -> None:
    clients = [FakeClient() for _ in range(4)]
    router = Router()
    picks = Counter(id(router.pick(request(i), clients)) for i in range(40))
    assert set(picks.values()) == {10}


def test_prompts_that_start_alike_meet_before_the_first_of_them_is_computed() -> None:
    clients = [FakeClient() for _ in range(3)]
    router = Router()
    homes = {number: router.pick(request(*prompt_of(number, 20)), clients) for number in range(3)}
    assert len({id(home) for home in homes.values()}) == 3
    for client in clients:
        set_load(client, 1)
    for number, home in homes.items():
        assert router.pick(request(*prompt_of(number, 20), 7, 8, 9), clients) is home


def test_every_router_knows_what_the_replicas_have_told() -> None:
    clients = [FakeClient() for _ in range(3)]
    cache(clients[1], *prompt_of(1))
    for _ in range(5):  # as in API processes that have not seen the prompt
        assert Router().pick(request(*prompt_of(1), 5), clients) is clients[1]


def test_an_evicted_prefix_attracts_nothing() -> None:
    clients = [FakeClient(), FakeClient()]
    cache(clients[1], *prompt_of(1))
    clients[1].prefixes.clear()
    router = Router()
    picks = Counter(id(router.pick(request(*prompt_of(number)), clients)) for number in range(1, 9))
    assert set(picks.values()) == {4}


def test_the_longest_agreement_wins() -> None:
    clients = [FakeClient(), FakeClient()]
    cache(clients[0], *prompt_of(1, 4))
    cache(clients[1], *prompt_of(1, 4), *prompt_of(2, 2))
    for _ in range(4):
        assert Router().pick(request(*prompt_of(1, 4), *prompt_of(2, 2), 5), clients) is clients[1]


def test_a_cached_prefix_is_worth_the_wait_that_it_spares_and_no_more() -> None:
    home, other = clients = [FakeClient(), FakeClient()]
    prompt = prompt_of(1, 20)  # 320 tokens
    cache(home, *prompt)
    pace: dict[str, float] = {"token_s": 0.001, "row_s": 0.01}
    set_load(home, 1, num_queued_tokens=200, **pace)
    set_load(other, 0, **pace)
    assert Router().pick(request(*prompt), clients) is home, "210 ms of waiting against 320 ms of computing"
    set_load(home, 1, num_queued_tokens=400, **pace)
    assert Router().pick(request(*prompt), clients) is other
    set_load(home, 20, token_s=0.001, row_s=0.02, num_queued_tokens=0)
    assert Router().pick(request(*prompt), clients) is other, "rows that decode are waited for as well"


def test_a_hot_prefix_does_not_overload_its_home() -> None:
    """Answers are long, so the replica that has the prefix would collect them."""
    clients = [FakeClient() for _ in range(4)]
    cache(clients[0], *prompt_of(1, 40))
    router, counts = Router(), Counter[int]()
    for number in range(200):
        chosen = router.pick(request(*prompt_of(1, 40), number), clients)
        counts[id(chosen)] += 1
        for client in clients:
            set_load(client, counts[id(client)], token_s=0.01, row_s=1e-6)
        busiest, mean = max(counts.values()), sum(counts.values()) / 4
        least = min(counts[id(client)] for client in clients)
        assert busiest <= max(MAX_LOAD * mean, least + MAX_IMBALANCE) + 1
    assert max(counts.values()) <= 1.3 * 50


@pytest.mark.parametrize("seed", range(12))
def test_prefixes_that_are_asked_for_equally_often_load_all_replicas_alike(seed: int) -> None:
    """Two API processes route, and every answer has ended before the next prompt comes."""
    rng, clients = Random(seed), [FakeClient() for _ in range(4)]
    routers, counts, homes = [Router(), Router()], Counter[int](), set[tuple[int, int]]()
    for router, client in itertools.product(routers, clients):
        router._look_at(client)  # from here on it knows what is served
    again = [number for number in range(12) for _ in range(7)]
    asked = [*rng.sample(range(12), 12), *rng.sample(again, len(again))]
    for number in asked:
        prompt = prompt_of(number, 16)
        picked = rng.choice(routers).pick(request(*prompt, 5), clients)
        chosen = next(client for client in clients if client is picked)
        counts[id(chosen)] += 1
        homes.add((number, id(chosen)))
        cache(chosen, *prompt)
        served = chosen.snapshot.num_prompt_tokens + len(prompt) + 1
        set_load(chosen, 0, num_prompt_tokens=served)
    assert len(homes) == 12, "each is computed once"
    assert max(counts.values()) <= 1.3 * len(asked) / 4, counts


def test_tokens_that_were_served_long_ago_count_less() -> None:
    now, clients = [0.0], [FakeClient(), FakeClient()]
    router = Router(clock=lambda: now[0])
    router.pick(request(1), clients)
    set_load(clients[0], 0, num_prompt_tokens=1000)
    set_load(clients[1], 0)
    assert router.pick(request(2), clients) is clients[1], "both are idle"
    now[0] += 10 * LATELY_S
    set_load(clients[0], 0)
    set_load(clients[1], 0, num_prompt_tokens=10)
    assert router.pick(request(3), clients) is clients[0], "1000 tokens then are less than 10 now"


@pytest.mark.parametrize("forgets", [False, True])
def test_what_a_replica_served_before_it_was_looked_at_is_not_lately(forgets: bool) -> None:
    """As in an API process that joins late, and after the prefix caches were emptied."""
    now, clients = [0.0], [FakeClient(), FakeClient()]
    router, counts = Router(clock=lambda: now[0]), Counter[int]()
    if forgets:
        router.pick(request(1), clients)
    for client, served in zip(clients, (5_000_000, 4_000_000), strict=True):
        set_load(client, 0, num_prompt_tokens=served)
    now[0] += 20 * LATELY_S
    if forgets:
        router.pick(request(1), clients)
        now[0] += 20 * LATELY_S
        for client in clients:
            router.forget(client)
    for number in range(2, 122):
        now[0] += 2.0
        chosen = clients[router.pick(request(*prompt_of(number)), clients) is clients[1]]
        counts[id(chosen)] += 1
        served = chosen.snapshot.num_prompt_tokens + 2 * PREFIX_BLOCK
        set_load(chosen, 0, num_prompt_tokens=served)
    assert max(counts.values()) <= 66, counts


def test_salts_are_part_of_a_prefix() -> None:
    clients = [FakeClient(), FakeClient()]
    cache(clients[1], *prompt_of(1), salt="a")
    assert all(Router().pick(request(*prompt_of(1), salt="a"), clients) is clients[1] for _ in range(3))
    keys = [prefix_hashes(request(*prompt_of(1), salt=salt), PREFIX_BLOCK, 64) for salt in ("", "a", "b")]
    assert len({key for each in keys for key in each}) == 6, "no two have one in common"


def test_what_the_base_model_has_cached_is_no_prefix_of_an_adapter() -> None:
    plain = request(*prompt_of(1))
    keys = [prefix_hashes(each, PREFIX_BLOCK, 64) for each in (plain, replace(plain, adapter="sql"))]
    assert set(keys[0]).isdisjoint(keys[1])


def test_prompts_of_an_adapter_go_on_meeting_though_no_engine_tells_of_them() -> None:
    clients, now = [FakeClient() for _ in range(3)], [0.0]
    router = Router(clock=lambda: now[0])
    asked = replace(request(*prompt_of(1, 20)), adapter="sql")
    home = router.pick(asked, clients)
    for now[0] in (5 * EXPECTED_S, ADAPTER_S):  # the second is counted from the first
        for client in clients:
            set_load(client, 0)
        assert router.pick(asked, clients) is home


def test_a_replica_that_is_down_gets_nothing_unless_all_are() -> None:
    clients = [FakeClient(), FakeClient()]
    clients[0].failure = EngineStopped("dead")
    router = Router()
    assert {id(router.pick(request(i), clients)) for i in range(6)} == {id(clients[1])}
    clients[1].failure = EngineStopped("dead too")
    assert router.pick(request(1), clients) in clients  # whose generate says why


def test_a_pick_that_never_became_work_is_forgotten_after_a_while() -> None:
    now = [0.0]
    clients = [FakeClient(), FakeClient()]
    router = Router(clock=lambda: now[0])
    for _ in range(9):
        router.pick(request(*prompt_of(1)), clients)
    now[0] += EXPECTED_S + 1
    assert [router._look_at(client).num_requests for client in clients] == [0, 0]
    keys = prefix_hashes(request(*prompt_of(1)), PREFIX_BLOCK, 64)
    assert [router._num_known(keys, client) for client in clients] == [0, 0]


def test_memory_is_bounded_and_forgotten_caches_leave_no_trace() -> None:
    clients = [FakeClient(), FakeClient()]
    router = Router()
    for number in range(150):
        router.pick(request(*range(number * 8192, (number + 1) * 8192)), clients)
    assert len(router._expected) == router_module.MAX_EXPECTED
    for client in clients:
        router.forget(client)
    assert not router._expected and len(router._sent) == 2


def test_a_replica_that_gives_no_sign_of_life_is_left_out_until_it_does() -> None:
    quiet, other = clients = [FakeClient(), FakeClient()]
    router = Router()
    prompt = prompt_of(1)
    cache(quiet, *prompt)
    quiet.silent_s = router_module.MAX_SILENCE_S + 1
    set_load(other, 40)
    assert {id(router.pick(request(*prompt), clients)) for _ in range(10)} == {id(other)}
    other.silent_s = quiet.silent_s
    assert router.pick(request(7), clients) is quiet, "all are silent: the least busy one"
    quiet.silent_s = 0.0
    assert router.pick(request(8), clients) is quiet


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_prompts_are_cut_into_the_blocks_of_the_engine(block_size: int) -> None:
    clients = [FakeClient(), FakeClient()]
    for client in clients:
        set_load(client, 0, block_size=block_size)
    prompt = prompt_of(1, 8)
    clients[0].prefixes.update(prefix_hashes(request(*prompt), block_size, 512))
    assert all(Router().pick(request(*prompt, 1, 2), clients) is clients[0] for _ in range(3))

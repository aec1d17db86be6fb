from __future__ import annotations

from collections import Counter
from dataclasses import replace

from infer.errors import EngineStopped
from infer.scheduling.request import Request
from infer.server.fleet import router as router_module
from infer.server.fleet.router import MAX_IMBALANCE, PREFIX_BLOCK, Router
from tests.support.fake_client import FakeClient


def request(*prompt: int, salt: str = "") -> Request:
    return Request(request_id="r", prompt=prompt, cache_salt=salt)


def prompt_of(number: int, num_blocks: int = 2) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + num_blocks * PREFIX_BLOCK))


def set_load(client: FakeClient, num_running: int) -> None:
    step = client.snapshot.num_steps + 1
    client.snapshot = replace(client.snapshot, num_running=num_running, num_steps=step)


def test_a_single_replica_gets_everything() -> None:
    only = FakeClient()
    assert Router().pick(request(1, 2, 3), [only]) is only


def test_a_burst_between_two_steps_is_spread_evenly() -> None:
    clients = [FakeClient() for _ in range(4)]
    router = Router()
    picks = Counter(id(router.pick(request(i), clients)) for i in range(40))
    assert set(picks.values()) == {10}


def test_prompts_that_start_alike_meet_on_one_replica() -> None:
    clients = [FakeClient() for _ in range(3)]
    router = Router()
    homes = {number: router.pick(request(*prompt_of(number)), clients) for number in range(3)}
    for client in clients:
        set_load(client, 1)
    for number, home in homes.items():
        assert router.pick(request(*prompt_of(number), 7, 8, 9), clients) is home


def test_the_longest_agreement_wins() -> None:
    clients = [FakeClient(), FakeClient()]
    router = Router()
    short = router.pick(request(*prompt_of(1, 1)), clients)
    longer = (*prompt_of(1, 1), *prompt_of(2, 2))
    other = next(client for client in clients if client is not short)
    router._remember(router_module._prefix_keys(request(*longer)), other)
    for client in clients:
        set_load(client, 0)
    assert router.pick(request(*longer, 5), clients) is other


def test_a_busy_home_loses_its_guest_to_an_idle_replica_and_the_guest_stays_there() -> None:
    clients = [FakeClient(), FakeClient()]
    router = Router()
    prompt = request(*prompt_of(1))
    home = router.pick(prompt, clients)
    other = next(client for client in clients if client is not home)
    assert isinstance(home, FakeClient)
    set_load(home, MAX_IMBALANCE)
    set_load(other, 0)
    assert router.pick(prompt, clients) is home, "within bounds the cache is worth the wait"
    set_load(home, MAX_IMBALANCE + 1)
    set_load(other, 0)
    assert router.pick(prompt, clients) is other
    set_load(home, 0)
    set_load(other, 0)
    assert router.pick(prompt, clients) is other


def test_different_salts_do_not_attract_each_other() -> None:
    keys = [router_module._prefix_keys(request(*prompt_of(1), salt=salt)) for salt in ("", "a", "b")]
    assert len({tuple(each) for each in keys}) == 3


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
    now[0] += 10
    assert [router._load(client) for client in clients] == [0, 0]


def test_memory_is_bounded_and_a_forgotten_replica_leaves_no_trace() -> None:
    clients = [FakeClient(), FakeClient()]
    router = Router()
    for number in range(1200):
        router.pick(request(*range(number * 5000, number * 5000 + 64 * PREFIX_BLOCK)), clients)
    assert len(router._served_by) == router_module.MAX_REMEMBERED
    for client in clients:
        router.forget(client)
    assert not router._served_by and not router._sent


def test_a_replica_that_gives_no_sign_of_life_is_left_out_until_it_does() -> None:
    quiet, other = clients = [FakeClient(), FakeClient()]
    router = Router()
    prompt = prompt_of(1)
    router._load(quiet)
    router._remember(router_module._prefix_keys(request(*prompt)), quiet)
    quiet.silent_s = router_module.MAX_SILENCE_S + 1
    set_load(other, 40)
    assert {id(router.pick(request(*prompt), clients)) for _ in range(10)} == {id(other)}
    other.silent_s = quiet.silent_s
    assert router.pick(request(7), clients) is quiet, "all are silent: the least busy one"
    quiet.silent_s = 0.0
    assert router.pick(request(8), clients) is quiet

from __future__ import annotations

from infer.cluster.scaling import LoadReport, Scaler, read_load

CALM = 300.0


def scaler(lowest: int = 1, highest: int = 3) -> Scaler:
    return Scaler(lowest, highest, target_s=1.0, scale_down_after=CALM)


def report(
    number: int = 0, *, running: int = 0, waiting: int = 0, queue_s: float = 0, began: int = 0
) -> LoadReport:
    return LoadReport(number, running, waiting, queue_s, began)


def test_a_page_is_read_and_its_engines_are_added_up() -> None:
    page = (
        b"# HELP infer_num_requests_running Sequences.\n"
        b'infer_num_requests_running{engine="0",model_name="a"} 3.0\n'
        b'infer_num_requests_running{engine="1",model_name="a"} 4.0\n'
        b'infer_num_requests_waiting{engine="0",model_name="a"} 2.0\n'
        b'infer_request_queue_time_seconds_bucket{engine="0",le="1"} 9.0\n'
        b'infer_request_queue_time_seconds_sum{engine="0"} 1.5\n'
        b'infer_request_queue_time_seconds_count{engine="0"} 10.0\n'
    )
    assert read_load(5, page) == LoadReport(5, 7.0, 2.0, 1.5, 10.0)


def test_long_queues_at_two_looks_add_one_up_to_the_limit() -> None:
    made = scaler(highest=2)
    made.decide([report()], 0)
    assert made.decide([report(queue_s=20, began=10)], 1) == 1
    assert made.decide([report(queue_s=40, began=20)], 2) == 2
    both = [report(0, queue_s=60, began=30), report(1, queue_s=20, began=10)]
    assert made.decide(both, 3) == 2
    assert made.decide([each._replace(queue_s=each.queue_s + 99, num_queued=50) for each in both], 4) == 2


def test_sequences_that_wait_without_ever_starting_count_too() -> None:
    made = scaler()
    assert [made.decide([report(running=4, waiting=2)], now) for now in (0, 0.5, 1.5, 2.5)] == [1, 1, 1, 2]


def test_one_long_queue_beside_a_short_one_is_the_routers_business() -> None:
    made = scaler()
    for now in range(5):
        full = report(0, running=4, waiting=9, queue_s=now * 100, began=now * 10)
        assert made.decide([full, report(1)], now) == 2


def test_short_waits_add_nothing() -> None:
    made = scaler()
    for now in range(10):
        assert made.decide([report(queue_s=now * 0.5, began=now * 10)], now) == 1


def test_a_long_calm_takes_one_away_down_to_the_limit() -> None:
    made = scaler(lowest=1)
    two = [report(0, running=1), report(1)]
    assert made.decide(two, 0) == 2
    assert made.decide(two, CALM - 1) == 2
    assert made.decide(two, CALM) == 1
    assert [made.decide([report()], CALM * n) for n in (2, 3, 4, 5)] == [1, 1, 1, 1]


def test_a_replica_stays_while_the_others_could_not_hold_what_runs() -> None:
    made = scaler()
    made.decide([report(0, running=4, waiting=1), report(1, running=4)], 0)  # four are all that one can run
    busy = [report(0, running=3), report(1, running=3)]
    assert [made.decide(busy, CALM * n) for n in range(1, 5)] == [2, 2, 2, 2]
    idle = [report(0, running=2), report(1, running=1)]
    assert made.decide(idle, CALM * 5) == 2
    assert made.decide(idle, CALM * 6) == 1


def test_a_replica_that_was_started_anew_has_no_negative_queue() -> None:
    made = scaler()
    made.decide([report(queue_s=100, began=1000)], 0)
    assert made.decide([report(queue_s=0.1, began=3)], 1) == 1


def test_a_replica_without_a_place_stops_growth_and_is_taken_back_after_a_calm() -> None:
    made = scaler(highest=9)
    busy = [report(0, running=4, waiting=9), report(1, running=4, waiting=9)]
    assert [made.decide(busy, now, 1) for now in range(9)] == [3] * 9, "a fourth has no place either"
    rest = [report(0, running=1), report(1, running=1)]
    assert made.decide(rest, 8 + CALM - 1, 1) == 3
    assert made.decide(rest, 8 + CALM, 1) == 2


def test_without_reports_nothing_is_decided() -> None:
    assert scaler().decide([], 0) == 0

"""Turns on the device, and what `--parallel auto` makes of what trials log."""

from fasttrain.studies.search.standing import covered
from fasttrain.studies.search.turns import Turns, fits_beside


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turns_of(wanted):
    told, going, clock = [], [], Clock()
    turns = Turns(wanted, told.append, clock)

    def log(slot: int, rate: float, times: int = 5) -> None:
        for _ in range(times):
            clock.now += 2.0
            turns.rate(slot, rate)

    return turns, told, going, log


def test_one_after_another_and_a_turn_is_passed_on() -> None:
    turns, _, going, _ = turns_of(1)
    for slot in (0, 1):
        turns.ready(slot, lambda slot=slot: going.append(slot))
    assert going == [0]
    turns.released(0)
    turns.released(0)
    assert going == [0, 1]


def test_a_trial_that_ends_while_it_waits_gets_no_turn() -> None:
    turns, _, going, _ = turns_of(1)
    turns.ready(0, lambda: going.append(0))
    turns.ready(1, lambda: going.append(1))
    turns.released(1)
    turns.released(0)
    assert going == [0]


def together(rate: float):
    turns, told, going, log = turns_of(None)
    turns.ready(0, lambda: going.append(0))
    turns.ready(1, lambda: going.append(1))
    log(0, 100.0)
    assert going == [0, 1]
    for _ in range(6):
        log(0, rate, 1)
        log(1, rate, 1)
    return turns, told


def test_auto_takes_two_where_they_do_more_than_one() -> None:
    turns, told = together(70.0)
    assert turns.decided == turns.capacity == 2
    assert told == [
        "--parallel auto: one trial alone trains 100.0 patches/s, two at once 140.0 together (+40%): two at once"
    ]


def test_auto_takes_one_where_two_do_no_more() -> None:
    turns, told = together(51.0)
    assert turns.decided == turns.capacity == 1
    assert "(+2%): one after another" in told[0]
    going = []
    turns.released(0)
    turns.ready(2, lambda: going.append(2))
    assert going == []
    turns.released(1)
    assert going == [2]


def test_memory_decides_before_anything_is_measured() -> None:
    assert [fits_beside(gib, 80.0) for gib in (30.0, 40.0, None)] == [True, False, None]
    turns, told, _, log = turns_of(None)
    turns.does_not_fit("no room")
    turns.ready(0, lambda: None)
    log(0, 100.0)
    assert turns.capacity == 1
    assert told == ["no room"]


def test_time_that_two_trials_share_counts_once() -> None:
    assert covered([(0, 10), (5, 12), (20, 21), (20.5, 20.7)]) == 13.0
    assert covered([]) == 0.0

"""The parts of a start add up to the seconds until the first step, in whatever pieces they come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.telemetry.start_clock import PARTS, StartClock


@given(pieces=st.lists(st.tuples(st.sampled_from(PARTS[:-1]), st.floats(0, 100)), max_size=30), last=st.floats(0, 100))
def test_parts_add_up_to_the_whole(pieces: list[tuple[str, float]], last: float) -> None:
    moments = itertools.accumulate([1e9, *(seconds for _, seconds in pieces), last])
    began = next(moments)
    clock = StartClock(began, lambda: next(moments))
    for part, _ in pieces:
        clock.ended(part)
    assert not clock.over
    assert clock.total is None
    clock.ended("first_step")
    assert clock.over
    assert clock.total == pytest.approx(sum(seconds for _, seconds in pieces) + last, abs=1e-4)
    assert sum(clock.seconds.values()) == pytest.approx(clock.total, abs=1e-4)
    assert list(clock.seconds) == [part for part in PARTS if part in clock.seconds]


def test_a_part_in_two_stretches_is_one_and_nothing_counts_after_the_first_step() -> None:
    moments = iter([1.0, 3.0, 6.0, 10.0])
    clock = StartClock(0.0, lambda: next(moments))
    for part in ("plan", "check", "plan", "first_step"):
        clock.ended(part)
    clock.ended("first_step")
    clock.ended("read")
    assert clock.seconds == {"check": 2.0, "plan": 4.0, "first_step": 4.0}
    assert clock.total == 10.0


def test_a_part_that_no_start_has_is_refused() -> None:
    with pytest.raises(ValueError, match="reading is no part of a start; they are import, device"):
        StartClock(0.0).ended("reading")

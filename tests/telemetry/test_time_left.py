"""The estimate of the time left: medians, validations counted in, nothing claimed before anything was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.telemetry.clock import TimeLeft, estimate_seconds_left


def test_nothing_is_known_before_a_step_was_measured() -> None:
    assert estimate_seconds_left(10, 1, [], [3.0]) is None
    assert TimeLeft(3, 10, 1).seconds_left(0) is None


def test_steps_and_validations_add_up() -> None:
    assert estimate_seconds_left(10, 2, [0.5], [3.0]) == pytest.approx(11.0)


def test_a_slow_first_measurement_does_not_count() -> None:
    assert estimate_seconds_left(10, 0, [40.0, 0.5], []) == pytest.approx(5.0)
    assert estimate_seconds_left(10, 0, [0.4, 0.5, 90.0], []) == pytest.approx(5.0)


def test_a_whole_run_counts_down_to_zero() -> None:
    clock = TimeLeft(epochs=4, steps_per_epoch=10, validate_every=2)
    seen = []
    for step in range(1, 41):
        clock.add_steps(1, 0.5)
        if step in (20, 40):
            clock.add_validation(step, 6.0)
        seen.append(clock.seconds_left(step))
    assert seen[9] == pytest.approx(15.0)  # no validation measured yet
    assert seen[19] == pytest.approx(10.0 + 6.0)
    assert seen[38] == pytest.approx(0.5 + 6.0)
    assert seen[39] == 0.0


def test_old_measurements_are_forgotten() -> None:
    clock = TimeLeft(1, 100, 1, recent=3)
    for seconds in (9.0, 9.0, 9.0, 1.0, 1.0, 1.0):
        clock.add_steps(1, seconds)
    assert clock.seconds_left(90) == pytest.approx(10.0)


@given(epochs=st.integers(1, 12), per_epoch=st.integers(1, 6), every=st.integers(1, 15), step=st.integers(0, 72))
def test_validations_left_equals_counting_them(epochs: int, per_epoch: int, every: int, step: int) -> None:
    step = min(step, epochs * per_epoch)
    ends = [epoch * per_epoch for epoch in range(1, epochs + 1) if epoch % every == 0 or epoch == epochs]
    clock = TimeLeft(epochs, per_epoch, every)
    assert clock.validations_left(step) == sum(end >= step for end in ends)
    clock.add_validation(step, 1.0)
    assert clock.validations_left(step) == sum(end > step for end in ends)


def test_a_validation_counts_before_one_was_measured() -> None:
    """Of a run that validates every ten epochs the first figures would else leave all of it out."""
    clock = TimeLeft(epochs=20, steps_per_epoch=10, validate_every=10)
    clock.add_steps(10, 5.0)
    assert clock.seconds_left(10) == pytest.approx(95.0)
    clock.expect_validation(8.0)
    assert clock.seconds_left(10) == pytest.approx(95.0 + 2 * 8 * 0.5)
    # What was measured takes its place
    clock.add_validation(100, 30.0)
    assert clock.seconds_left(100) == pytest.approx(50.0 + 30.0)

"""The order of a sweep over batch sizes and the choice among them, on made curves of throughput and memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.studies.choice import choose, finalists, limit_of
from fasttrain.studies.sweep import HUNG, MARGIN, MEMORY, OK, Bounds, Point, Sweep, tolerance_of


def point(size: int, rate: float = 0.0, status: str = OK, **values: object) -> Point:
    return Point(size, status, "as made", rate if status in (OK, MARGIN) else 0.0, values=values)


def swept(rate, fits: int = 10**6, **bounds: object) -> Sweep:
    """A sweep where batch b runs at rate(b), and sizes above `fits` run out of memory."""
    measured = lambda size: point(size, rate(size)) if size <= fits else point(size, status=MEMORY)  # noqa: E731
    sweep = Sweep(Bounds(**{"start": 2, "most": 1000, "trials": 20, **bounds}), measured)
    sweep.run()
    return sweep


def sizes(sweep: Sweep) -> list[int]:
    return [one.batch_size for one in sweep.points]


def saturating(size: int) -> float:
    return 100 * size / (size + 2)


def test_doubling_begins_with_the_recipes_own_size_and_ends_where_throughput_falls() -> None:
    sweep = swept(lambda size: 100 - (size - 8) ** 2 / 4, start=2)
    assert sizes(sweep)[:5] == [2, 4, 8, 16, 1]
    assert sweep.ended == "throughput falls at batch 16"
    assert choose(sweep.points, "throughput").batch_size in range(6, 11)


def test_the_slower_larger_batch_is_not_chosen_since_it_fits() -> None:
    sweep = swept(lambda size: 60 - 3 * size)
    assert choose(sweep.points, "throughput").batch_size == 1


def test_refinement_goes_between_the_largest_that_fits_and_the_first_that_does_not() -> None:
    sweep = swept(saturating, fits=13, start=1)
    assert sweep.ended == "memory ends at batch 16"
    assert max(one.batch_size for one in sweep.points if one.ok) >= 12
    assert limit_of(sweep.points, choose(sweep.points, "largest"), 1000, True, None)[0] == "memory"


def test_where_the_recipes_own_size_does_not_fit_smaller_ones_are_tried() -> None:
    sweep = swept(saturating, fits=5, start=32)
    assert sizes(sweep)[:4] == [32, 16, 8, 4]
    assert sweep.ended == "memory ends at batch 32"
    assert choose(sweep.points, "throughput").batch_size in (4, 5)


def test_nothing_fits() -> None:
    sweep = swept(saturating, fits=0, start=4)
    assert sizes(sweep) == [4, 2, 1]
    assert choose(sweep.points, "throughput") is None


def test_a_data_set_smaller_than_the_batch_ends_the_sweep_at_a_useful_limit() -> None:
    sweep = swept(lambda size: float(size), most=36)
    assert max(sizes(sweep)) == 36 - 4  # 32; a limit a little above it would tell nothing more
    assert sweep.ended == "one pass over the training cases has 36 patches"
    assert max(sizes(swept(lambda size: float(size), most=24))) == 24
    assert sizes(swept(lambda size: float(size), most=1, start=8)) == [1]


def test_a_rate_that_no_longer_rises_ends_the_sweep() -> None:
    sweep = swept(lambda size: 50.0)
    assert sizes(sweep) == [2, 4, 8, 1]
    assert sweep.ended == "throughput no longer rises at batch 8"
    assert choose(sweep.points, "throughput").batch_size == 1


def test_sizes_that_were_asked_for_are_measured_and_no_others() -> None:
    assert sizes(swept(saturating, sizes=(1, 3, 9))) == [1, 3, 9]
    cut = swept(saturating, sizes=(1, 3, 9, 27), fits=5)
    assert (sizes(cut), cut.ended) == ([1, 3, 9], "memory ends at batch 9")


def test_only_sizes_that_the_policy_allows_are_tried() -> None:
    sweep = swept(lambda size: float(size), start=4, most=500, allowed=lambda size: 12 % size == 0)
    assert set(sizes(sweep)) <= {1, 2, 3, 4, 6, 12}
    assert 12 in sizes(sweep)


def test_trials_and_time_are_bounded() -> None:
    assert len(swept(saturating, trials=3).points) == 3
    left = iter([True, True, False])
    sweep = Sweep(Bounds(2, 1000, 20), lambda size: point(size, float(size)) if next(left) else None)
    sweep.run()
    assert (len(sweep.points), sweep.ended) == (2, "the time for trials is over")


def test_a_hung_trial_ends_the_way_up_and_is_not_taken_for_too_large_a_batch() -> None:
    hung = lambda size: Point(size, HUNG, "ended after 120 s") if size > 4 else point(size, saturating(size))  # noqa: E731
    sweep = Sweep(Bounds(2, 1000, 20, refine=False), hung)
    sweep.run()
    assert sweep.ended == "batch 8 was ended at its time limit"
    assert limit_of(sweep.points, choose(sweep.points, "throughput"), 1000, True, None)[0] != "memory"


@given(
    st.integers(1, 64),
    st.integers(1, 300),
    st.integers(1, 200),
    st.floats(0.1, 50),
    st.sampled_from(["rise", "fall", "peak"]),
)
def test_no_sweep_measures_a_size_twice_or_beyond_its_bounds(
    start: int, most: int, fits: int, knee: float, form: str
) -> None:
    rates = {
        "rise": lambda size: 100 * size / (size + knee),
        "fall": lambda size: 100 / (size + knee),
        "peak": lambda size: 100 - abs(size - knee),
    }
    sweep = swept(rates[form], fits=fits, start=start, most=most, trials=12)
    measured = sizes(sweep)
    assert len(measured) == len(set(measured)) <= 12
    assert all(1 <= size <= most for size in measured)
    chosen = choose(sweep.points, "throughput")
    able = [one for one in sweep.points if one.ok]
    assert (chosen is None) == (not able)
    if chosen is not None:
        best = max(one.rate for one in able)
        assert chosen.rate >= 0.98 * best
        assert not any(one.batch_size < chosen.batch_size and one.rate >= 0.98 * best for one in able)


def test_the_preferences() -> None:
    points = [
        point(1, 50),
        point(2, 91, reserved_bytes=2),
        point(4, 99, reserved_bytes=4),
        point(8, 100, reserved_bytes=8),
    ]
    assert choose(points, "throughput").batch_size == 4
    assert choose(points, "memory").batch_size == 2
    assert choose(points, "largest").batch_size == 8


def test_what_leaves_too_little_memory_is_never_chosen() -> None:
    points = [point(4, 90), point(8, 120, status=MARGIN)]
    for prefer in ("throughput", "memory", "largest"):
        assert choose(points, prefer).batch_size == 4
    assert limit_of(points, points[0], 100, True, None)[0] == "memory"


def test_rates_that_scatter_widen_what_counts_as_equal_but_not_without_bound() -> None:
    assert tolerance_of([point(1, 10)]) == 0.02
    assert tolerance_of([Point(1, OK, "", 10, spread=0.05)]) == 0.05
    assert tolerance_of([Point(1, OK, "", 10, spread=0.9)]) == 0.1


def test_the_finalists_are_the_choice_and_the_fastest_of_the_others() -> None:
    points = [point(2, 60), point(4, 99), point(8, 100), point(16, status=MEMORY)]
    assert [one.batch_size for one in finalists(points, "throughput")] == [4, 8]
    assert [one.batch_size for one in finalists([point(2, 60)], "throughput")] == [2]
    assert finalists([point(1, status=MEMORY)], "throughput") == []


@pytest.mark.parametrize(
    ("waits", "expected"), [(0.4, "data"), (0.02, "device")], ids=["waiting for data", "the device's own speed"]
)
def test_what_limits_is_judged_by_the_figures(waits: float, expected: str) -> None:
    points = [point(2, 90), point(4, 100, wait_share=waits, utilisation=0.97), point(8, 100)]
    by, why = limit_of(points, points[1], 1000, True, None)
    assert by == expected
    assert f"{waits:.0%}" in why

"""What the attempts at a run took, from its events: also of those that were killed, and of torn lines."""

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from fasttrain.telemetry.attempts import Attempt, known_attempts, read_attempts


def line(seconds: float, event: str, **more: object) -> str:
    time = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "event": event, **more}) + "\n"


def test_a_run_that_never_began_has_none(tmp_path: Path) -> None:
    assert read_attempts(tmp_path / "events.jsonl") == ()
    (tmp_path / "events.jsonl").touch()
    assert read_attempts(tmp_path / "events.jsonl") == ()


def test_each_counts_from_its_process_to_its_last_event(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text(
        line(1010, "RunStarted", began=1000.0, price_per_hour=2.5)
        + line(1050, "StepLogged", step=5)
        # Killed here; the time until the next one is nobody's
        + line(9020, "RunStarted", began=9000.0, price_per_hour=None)
        + line(9060, "StepLogged", step=9)
        + line(9100, "RunEnded", status="done")
    )
    assert read_attempts(events) == (Attempt(pytest.approx(50), 2.5), Attempt(pytest.approx(100), None))


def test_torn_lines_and_events_without_a_beginning_are_borne(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    torn = line(1070, "StepLogged", step=6)[:30]
    events.write_text(
        "no json\n"
        + line(500, "Message", text="before any start")
        + line(1010, "RunStarted")
        + line(1040, "StepLogged", step=5)
        + torn
        + "\n"
        + line(2000, "RunStarted", began=1990.0)
        + torn
    )
    assert read_attempts(events) == (Attempt(pytest.approx(30), None), Attempt(pytest.approx(10), None))


def test_a_message_that_speaks_of_a_start_is_none(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text(line(1010, "RunStarted", began=1000.0) + line(1030, "Message", text='"RunStarted"'))
    assert read_attempts(events) == (Attempt(pytest.approx(30), None),)


def test_a_clock_that_was_set_back_takes_nothing_off(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text(line(1010, "RunStarted", began=1000.0) + line(900, "StepLogged", step=1))
    assert read_attempts(events) == (Attempt(0.0, None),)


def summary(hours: object, cost: object = None, price: object = 2.0) -> dict:
    return {"hours": {"run": hours}, "cost": None if cost is None else {"run": cost, "price_per_hour": price}}


def test_what_a_lost_log_no_longer_tells_the_summary_does(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert known_attempts(events, summary(7.0, 21.0, 3.0)) == (Attempt(pytest.approx(7 * 3600), pytest.approx(3.0)),)
    events.write_text(line(1010, "RunStarted", began=1000.0, price_per_hour=3.6) + line(4600, "StepLogged", step=5))
    # An hour for 3.60 is told; of 7 h for 21 USD six for 17.40 are not
    found = known_attempts(events, summary(7.0, 21.0, 3.0))
    assert found == (Attempt(pytest.approx(6 * 3600), pytest.approx(2.9)), Attempt(pytest.approx(3600), 3.6))
    assert sum(one.seconds / 3600 * one.price_per_hour for one in found) == pytest.approx(21.0)
    # What the log tells beyond the summary, of an attempt that was killed, counts
    assert known_attempts(events, summary(0.5, 1.0)) == read_attempts(events) == found[1:]
    assert known_attempts(events, summary(1.0, 3.6, 3.6)) == found[1:]


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"hours": 3, "cost": "much"},
        summary("x", [1]),
        summary(float("nan"), float("inf")),
        summary(True),
        summary(-5, -5),
    ],
)
def test_a_summary_that_says_nothing_usable_adds_nothing(told: dict, tmp_path: Path) -> None:
    assert known_attempts(tmp_path / "none", told) == ()


def test_each_start_tells_of_all_that_was_before_it(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    second = line(5010, "RunStarted", began=5000.0, price_per_hour=2.0, earlier_seconds=7200.0, earlier_cost=4.0)
    events.write_text(second + line(5100, "StepLogged", step=9))
    assert read_attempts(events) == (Attempt(pytest.approx(7200), pytest.approx(2.0)), Attempt(pytest.approx(100), 2.0))
    whole = line(1000, "RunStarted", began=1000.0, price_per_hour=2.0) + line(8200, "StepLogged", step=5)
    events.write_text(whole + second + line(5100, "StepLogged", step=9))
    assert read_attempts(events) == (Attempt(pytest.approx(7200), 2.0), Attempt(pytest.approx(100), 2.0))


@pytest.mark.parametrize("value", ["NaN", "1e999", "-3", "true", '"x"', "[" * 100_000])
def test_figures_that_can_be_none_do_not_undo_the_others(value: str, tmp_path: Path) -> None:
    """A cost that is no number would be below every limit."""
    events = tmp_path / "events.jsonl"
    good = line(1010, "RunStarted", began=1000.0, price_per_hour=2.0) + line(1050, "StepLogged", step=5)
    bad = '{"time": "2026-01-01T00:00:00+00:00", "event": "RunStarted", "began": %s, "price_per_hour": %s}\n'
    events.write_text(good + bad % (value, value))
    found = read_attempts(events)
    assert found[0] == Attempt(pytest.approx(50), 2.0)
    assert all(one == Attempt(0.0, None) for one in found[1:])

"""What the attempts at a run took, from its events: also of those that were killed, and of torn lines."""

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from fasttrain.telemetry.attempts import Attempt, read_attempts


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

"""events.jsonl: valid JSON for every event, edges of progress only, and files that a killed run left torn."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.errors import StorageError
from fasttrain.telemetry.event_log import EventLog, read_events
from fasttrain.telemetry.events import EpochEnded, Message, Progress, RunStarted, StepLogged, ValidationFigures


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def log(path: Path, *events) -> list[dict]:
    journal = EventLog(path)
    for event in events:
        journal.on_event(event)
    journal.close()
    return [strict(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_has_the_time_in_utc_and_the_events_fields(tmp_path: Path) -> None:
    started = RunStarted("runs/x", "demo", "cpu", 3, 20, 16, 4, decisions=(("amp", "bf16", "2.1x faster"),))
    (record,) = log(tmp_path / "deep" / "events.jsonl", started)
    assert list(record)[:2] == ["time", "event"]
    time = datetime.fromisoformat(record["time"])
    assert time.utcoffset() == timedelta(0)
    assert abs(datetime.now(timezone.utc) - time) < timedelta(minutes=1)
    assert record["event"] == "RunStarted"
    assert record["decisions"] == [["amp", "bf16", "2.1x faster"]]


def test_floats_that_are_not_finite_become_null(tmp_path: Path) -> None:
    scores = ValidationFigures(float("nan"), {"a": float("inf"), "b": 0.5}, {"a": 1, "b": 1})
    step = StepLogged(1, 5, 5, float("nan"), 1e-3, 10.0, float("-inf"))
    records = log(tmp_path / "e", step, EpochEnded(1, 5, 1.0, 0.5, 1e-3, 10.0, 0.0, validation=scores))
    assert records[0]["loss"] is None
    assert records[0]["wait_share"] is None
    assert records[1]["validation"]["dice"] is None
    assert records[1]["validation"]["dice_by_class"] == {"a": None, "b": 0.5}


def test_of_progress_only_the_first_and_the_last_are_kept(tmp_path: Path) -> None:
    caching = [Progress("caching", done, 50) for done in range(51)]
    validating = [Progress("validating", done, 4) for done in range(1, 5)]
    records = log(tmp_path / "e", *caching, *validating, *validating)
    kept = [(record["what"], record["done"]) for record in records]
    assert kept == [("caching", 0), ("caching", 50), *[("validating", 1), ("validating", 4)] * 2]


def test_work_that_was_cut_short_and_began_anew_is_logged_again(tmp_path: Path) -> None:
    records = log(tmp_path / "e", *(Progress("caching", done, 9) for done in (0, 1, 2, 0, 1, 9)))
    assert [record["done"] for record in records] == [0, 0, 9]


def test_a_torn_last_line_is_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log(path, Message("first"), Message("second"))
    path.write_bytes(path.read_bytes()[:-20])
    journal = EventLog(path)
    journal.on_event(Message("after the kill"))
    journal.close()
    assert [record["text"] for record in read_events(path)] == ["first", "after the kill"]


def test_a_whole_file_gets_no_empty_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log(path, Message("first"))
    log(path, Message("second"))
    assert len(path.read_text().splitlines()) == 2


def test_lines_are_there_before_closing_and_events_after_it_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = EventLog(path)
    journal.on_event(Message("first"))
    assert len(list(read_events(path))) == 1
    journal.close()
    journal.close()
    journal.on_event(Message("late"))
    assert len(list(read_events(path))) == 1


def test_reading_a_missing_file_gives_nothing(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "none")) == []


def test_a_path_that_is_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        EventLog(tmp_path)


@given(text=st.text(), loss=st.floats())
def test_any_text_and_number_stays_one_line_of_json(
    text: str, loss: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "events.jsonl"
    journal = EventLog(path)
    journal.on_event(Message(text))
    journal.on_event(StepLogged(1, 1, 1, loss, 1e-3, 1.0, 0.0))
    journal.close()
    lines = path.read_bytes().decode().split("\n")
    assert len(lines) == 3
    assert strict(lines[0])["text"] == text

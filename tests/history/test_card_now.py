"""The card's figures from another process: what the driver does not give is empty, never zero."""

import json
import os
import sys
from pathlib import Path

import fake_cards
import pytest
from made_runs import made_run

from fasttrain.cli.monitor_text import lines_of
from fasttrain.history.card_now import Card, CardNow
from fasttrain.history.watching import Watch
from fasttrain.run_folder import RunFolder

UUID = fake_cards.FIRST


def cards(**more: object) -> dict:
    return {"cards": [{"uuid": UUID, "name": "Fake", "busy": 97, "held": 41.5, **more}]}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    def installed(settings: dict) -> None:
        fake_cards.install(monkeypatch, **settings)

    return installed


def at_work(path: Path) -> RunFolder:
    hardware = {"device": "cuda:0", "device_name": "Fake", "gpu_uuid": UUID.removeprefix("GPU-")}
    folder = made_run(path, epochs=1, status=None, hardware=hardware)
    folder.claim()
    return folder


def test_all_figures(driver) -> None:
    driver(cards(milliwatts=512_400, limit=700_000, degrees=61))
    card = Card(UUID)
    assert card.read() == CardNow(0.97, 41.5, 80.0, 512.4, 700.0, 61.0)
    assert card.why_not is None
    card.close()
    assert card.read() is None


def test_what_the_driver_refuses_is_empty(driver) -> None:
    driver(cards())
    figures = Card(UUID).read()
    assert figures is not None
    assert (figures.watts, figures.limit_watts, figures.temperature) == (None, None, None)
    driver({**cards(), "figures": "nonsense"})
    assert Card(UUID).read() == CardNow()


@pytest.mark.parametrize("init", ["raises", "no driver", "odd"])
def test_without_a_driver_there_is_a_reason(driver, init: str) -> None:
    driver({**cards(), "init": init})
    card = Card(UUID)
    assert card.read() is None
    assert card.why_not


def test_without_its_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card = Card(UUID)
    assert card.read() is None
    assert "pynvml" in str(card.why_not)


def test_another_machines_card_is_not_shown_for_the_runs(driver) -> None:
    driver({"cards": [{"uuid": fake_cards.SECOND, "name": "Other", "busy": 5}]})
    card = Card(UUID)
    assert card.read() is None
    assert "knows no such card" in str(card.why_not)
    assert Card(None).read() is None


def test_a_run_at_work_shows_its_card_and_an_ended_one_does_not(driver, tmp_path: Path) -> None:
    driver(cards(milliwatts=512_400, limit=700_000, degrees=61))
    folder = at_work(tmp_path / "run")
    now = Watch(folder.path).read()
    assert now["gpu"]["now"]["watts"] == 512.4
    lines = dict(lines_of(now))
    assert lines["GPU"] == "now 97%, 41.5 of 80.0 GiB, 512 of 700 W, 61 °C"
    folder.release()
    now = Watch(folder.path).read()
    assert now["gpu"]["now"] is None
    assert "not at work" in dict(lines_of(now))["GPU"]
    json.dumps(now, allow_nan=False)


def test_a_run_at_work_elsewhere_shows_no_card_of_here(driver, tmp_path: Path) -> None:
    driver(cards())
    folder = at_work(tmp_path / "run")
    folder.release()
    folder.lock.write_text("process 3 on some-other-host")
    now = Watch(folder.path).read()
    assert now["status"] == "unseen"
    assert now["gpu"]["now"] is None
    assert os.uname().nodename != "some-other-host"

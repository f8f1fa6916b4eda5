"""A run's figures of the GPU are those of the card that it uses, and empty, never zero, where the driver gives none."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cards
import pytest
import torch

from fasttrain import train
from fasttrain.engine import preparing
from fasttrain.machine.hardware import survey

FEW = {"training__epochs": 1, "training__iterations_per_epoch": 1}


def row_of(run: Path) -> dict[str, str]:
    """The one row of a run's metrics."""
    (row,) = csv.DictReader((run / "metrics.csv").open(encoding="utf-8"))
    return row


@pytest.fixture
def on_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's device is the second card of the driver, which CUDA_VISIBLE_DEVICES makes torch's first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    bare = fake_cards.SECOND.removeprefix("GPU-")
    monkeypatch.setattr(preparing, "survey", lambda setting, seat=None: replace(survey(setting), gpu_uuid=bare))


def test_the_figures_are_of_the_card_that_the_run_uses(
    on_second: None, monkeypatch: pytest.MonkeyPatch, tiny, phantoms: Path, tmp_path: Path
) -> None:
    fake_cards.install(monkeypatch)
    row = row_of(train(tiny(**FEW), data=phantoms, run=tmp_path / "run", device="cpu").run)
    assert float(row["gpu_util"]) == pytest.approx(0.97)
    assert float(row["gpu_gib"]) == pytest.approx(42.0)


@pytest.mark.parametrize("broken", [{"init": "raises"}, {"figures": "nonsense"}, {"cards": fake_cards.CARDS[:1]}])
def test_a_broken_driver_leaves_the_figures_empty_and_the_run_alone(
    broken: dict[str, Any], on_second: None, monkeypatch: pytest.MonkeyPatch, tiny, phantoms: Path, tmp_path: Path
) -> None:
    fake_cards.install(monkeypatch, **broken)
    result = train(tiny(**FEW), data=phantoms, run=tmp_path / "run", device="cpu")
    row = row_of(result.run)
    assert (row["gpu_util"], row["gpu_gib"]) == ("", "")
    assert result.summary["status"] == "done"
    steps = [json.loads(line) for line in (result.run / "events.jsonl").read_text().splitlines()]
    assert [one["gpu_gib"] for one in steps if one["event"] == "StepLogged"] == [None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_auto_that_passes_a_gpu_over_says_so_in_the_run(
    monkeypatch: pytest.MonkeyPatch, tiny, phantoms: Path, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake_cards.install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    said: list[Any] = []
    run = train(tiny(**FEW), data=phantoms, run=tmp_path / "run", device="auto", observers=[_Listener(said)]).run
    assert any("training runs on the CPU (mend: pip install" in getattr(one, "text", "") for one in said)
    row = row_of(run)
    assert (row["gpu_util"], row["gpu_gib"]) == ("", "")
    assert "pynvml" in sys.modules


class _Listener:
    def __init__(self, heard: list[Any]) -> None:
        self._heard = heard

    def on_event(self, event: Any) -> None:
        self._heard.append(event)

    def close(self) -> None:
        pass

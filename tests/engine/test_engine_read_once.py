"""A new run reads each image once: the cache is made of what the check has read; and it is the same run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fasttrain import train
from fasttrain.data import nifti, seen_files
from fasttrain.engine.run import prepare
from fasttrain.telemetry.metrics_csv import read_metrics


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """How often each image was read as a whole; the check remembers nothing from before."""
    counts: Counter[str] = Counter()
    genuine = nifti._bytes_of

    def counting(path: Path, limit: int = -1) -> bytes:
        # A label is read once more when its case is scored, on the grid of the file
        if limit < 0 and path.parent.name == "imagesTr":
            counts[path.name] += 1
        return genuine(path, limit)

    monkeypatch.setattr(nifti, "_bytes_of", counting)
    monkeypatch.setattr(seen_files, "_JUST_NOW_NS", 0)
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    return counts


def test_each_file_is_read_once_and_the_losses_are_the_same(
    tiny, phantoms: Path, tmp_path: Path, opened: Counter[str]
) -> None:
    recipe = tiny(data__cache__kind="memory", training__epochs=1)
    once = train(recipe, data=phantoms, run=tmp_path / "once", device="cpu")
    assert len(opened) == 6
    assert set(opened.values()) == {1}
    assert not seen_files.SEEN._files

    # Remembered by the check, so that the cache alone reads
    opened.clear()
    again = train(recipe, data=phantoms, run=tmp_path / "again", device="cpu")
    assert set(opened.values()) == {1}
    losses = [[row["train_loss"] for row in read_metrics(one.run / "metrics.csv")] for one in (once, again)]
    assert losses[0] == losses[1]


def test_preparing_alone_keeps_nothing(tiny, phantoms: Path, opened: Counter[str]) -> None:
    prepare(tiny().recipe, phantoms, "cpu")
    assert set(opened.values()) == {1}
    assert not seen_files.SEEN._files


def test_no_room_changes_nothing_but_the_number_of_reads(
    tiny, phantoms: Path, tmp_path: Path, opened: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fasttrain.engine.run.memory_free", lambda: (0, "a test"))
    result = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "run", device="cpu")
    assert result.exit_code == 0
    assert set(opened.values()) == {2}

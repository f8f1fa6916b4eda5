"""The pictures: written whole from real tables, of one row or many, without touching pyplot."""

import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.telemetry.events import EpochEnded, ValidationFigures
from fasttrain.telemetry.metrics_csv import MetricsTable
from fasttrain.telemetry.plots import write_plots


def table(path: Path, epochs: int, classes: tuple[str, ...] = ("a", "b"), scored: bool = True) -> Path:
    rows = MetricsTable(path, classes, hd95=False)
    for epoch in range(1, epochs + 1):
        by_class = {name: None if name == "b" and epoch > 1 else 1 - 1 / (epoch + 1) for name in classes}
        scores = ValidationFigures(1 - 1 / (epoch + 1), by_class, {}) if scored and epoch % 2 else None
        loss = float("nan") if epoch == 3 else 1 / epoch
        rows.on_event(EpochEnded(epoch, epoch * 20, 1.0, loss, 1e-3, 9.0, 0.0, validation=scores))
    rows.close()
    return path


def size_of(picture: Path) -> tuple[int, int]:
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.parametrize("epochs", [1, 30])
def test_both_pictures_are_written_for_one_row_and_for_many(tmp_path: Path, epochs: int) -> None:
    written = write_plots(table(tmp_path / "metrics.csv", epochs), tmp_path / "plots")
    assert [path.name for path in written] == ["loss.png", "dice.png"]
    assert all(width > 500 and height > 300 for width, height in map(size_of, written))
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["dice.png", "loss.png"]


def test_pictures_change_with_their_numbers(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_plots(table(tmp_path / "m.csv", 5), tmp_path)]
    again = [path.read_bytes() for path in write_plots(tmp_path / "m.csv", tmp_path)]
    more = [path.read_bytes() for path in write_plots(table(tmp_path / "n.csv", 9), tmp_path)]
    assert first == again
    assert first[0] != more[0]
    assert first[1] != more[1]


def test_without_scores_there_is_no_dice_picture_and_without_rows_none(tmp_path: Path) -> None:
    written = write_plots(table(tmp_path / "m.csv", 4, scored=False), tmp_path / "plots")
    assert [path.name for path in written] == ["loss.png"]
    assert write_plots(table(tmp_path / "empty.csv", 0), tmp_path / "plots") == []
    assert write_plots(tmp_path / "missing.csv", tmp_path / "plots") == []


def test_forty_classes_still_fit(tmp_path: Path) -> None:
    classes = tuple(f"structure with a long name {number}" for number in range(40))
    assert len(write_plots(table(tmp_path / "m.csv", 6, classes), tmp_path)) == 2


def test_pyplot_stays_out_and_matplotlib_waits_until_a_picture_is_drawn(tmp_path: Path) -> None:
    csv = table(tmp_path / "m.csv", 2)
    script = (
        "import sys; from pathlib import Path; from fasttrain.telemetry.plots import write_plots\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "assert len(write_plots(Path(sys.argv[1]), Path(sys.argv[2]))) == 2\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(csv), str(tmp_path)], check=True)

"""metrics.csv: exact columns, empty cells, torn files and the rows that a resume takes back."""

import csv
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.errors import StorageError
from fasttrain.telemetry.events import EpochEnded, Message, ValidationFigures
from fasttrain.telemetry.metrics_csv import MetricsTable, class_slugs, drop_rows_after, metric_columns, read_metrics

CLASSES = ("anterior", "posterior")


def ended(epoch: int, **changes) -> EpochEnded:
    figures = {
        "epoch": epoch,
        "step": epoch * 10,
        "seconds": 1.5,
        "train_loss": 0.5 / epoch,
        "learning_rate": 2.1e-3,
        "patches_per_second": 54.2,
        "wait_share": 0.03,
    }
    return EpochEnded(**{**figures, **changes})


def write(path: Path, epochs: range, hd95: bool = False) -> None:
    table = MetricsTable(path, CLASSES, hd95)
    for epoch in epochs:
        table.on_event(ended(epoch))
    table.close()


def test_columns_are_the_documented_ones(tmp_path: Path) -> None:
    write(tmp_path / "plain.csv", range(1, 2))
    write(tmp_path / "distances.csv", range(1, 2), hd95=True)
    head = "epoch,step,seconds,train_loss,val_dice,val_dice_anterior,val_dice_posterior,"
    tail = "lr,patches_per_second,wait_share,gpu_util,gpu_gib"
    assert (tmp_path / "plain.csv").read_text().split("\n")[0] == head + tail
    with_hd95 = head + "val_hd95,val_hd95_anterior,val_hd95_posterior," + tail
    assert (tmp_path / "distances.csv").read_text().split("\n")[0] == with_hd95


def test_cells_without_a_figure_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path, CLASSES, hd95=True)
    table.on_event(ended(1))
    scores = ValidationFigures(0.9, {"anterior": 0.9, "posterior": None}, {"anterior": 3, "posterior": 0}, hd95=2.5)
    table.on_event(ended(2, validation=scores, gpu_utilisation=0.0, gpu_gib=41.25))
    table.close()
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert {name for name, cell in first.items() if cell == ""} == {
        *("val_dice", "val_dice_anterior", "val_dice_posterior"),
        *("val_hd95", "val_hd95_anterior", "val_hd95_posterior"),
        *("gpu_util", "gpu_gib"),
    }
    assert second["val_dice"] == "0.9"
    assert second["val_dice_posterior"] == second["val_hd95_anterior"] == ""
    assert (float(second["gpu_util"]), float(second["gpu_gib"])) == (0.0, 41.25)


def test_losses_and_scores_keep_every_digit(tmp_path: Path) -> None:
    path, loss, dice = tmp_path / "metrics.csv", 0.1 + 0.2, 2.0 / 3.0
    table = MetricsTable(path, CLASSES, hd95=False)
    table.on_event(ended(1, train_loss=loss, validation=ValidationFigures(dice, {"anterior": dice}, {"anterior": 1})))
    table.close()
    (row,) = read_metrics(path)
    assert (row["train_loss"], row["val_dice"], row["val_dice_posterior"]) == (loss, dice, None)


def test_a_row_is_on_the_disk_before_the_table_is_closed(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.csv", CLASSES, hd95=False)
    table.on_event(Message("not a row"))
    table.on_event(ended(1))
    assert [row["epoch"] for row in read_metrics(tmp_path / "metrics.csv")] == [1.0]
    table.close()
    table.close()


def test_resume_drops_newer_rows_and_appends_below_one_header(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 6))
    assert drop_rows_after(path, 30) == 2
    write(path, range(4, 6))
    lines = path.read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "1", "2", "3", "4", "5"]
    assert [name.name for name in tmp_path.iterdir()] == ["metrics.csv"]


def test_dropping_nothing_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    assert drop_rows_after(path, 0) == 0
    assert not path.exists()
    write(path, range(1, 4))
    before = (path.stat().st_ino, path.read_bytes())
    assert drop_rows_after(path, 30) == 0
    assert (path.stat().st_ino, path.read_bytes()) == before


def test_the_header_outlives_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 4))
    assert drop_rows_after(path, 0) == 3
    assert path.read_text() == ",".join(metric_columns(CLASSES, hd95=False)) + "\n"


@given(cut=st.integers(min_value=0, max_value=10_000))
def test_a_file_cut_anywhere_keeps_exactly_its_whole_rows(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.csv"
    write(path, range(1, 6))
    whole = path.read_bytes()
    left = whole[: cut % (len(whole) + 1)]
    path.write_bytes(left)
    rows_left = max(left.count(b"\n") - 1, 0)
    write(path, range(9, 10))
    assert [row["epoch"] for row in read_metrics(path)] == [*range(1, rows_left + 1), 9]
    assert path.read_bytes().endswith(b"\n")


def test_rows_of_zero_bytes_as_a_power_cut_leaves_them_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 3))
    with path.open("ab") as file:
        file.write(b"\0" * 40 + b"\n")
    assert drop_rows_after(path, 1000) == 1
    assert [row["epoch"] for row in read_metrics(path)] == [1.0, 2.0]


def test_other_columns_are_refused_with_both_lists(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, range(1, 2))
    with pytest.raises(StorageError, match=r"metrics\.csv.*val_dice_liver.*--run"):
        MetricsTable(path, ("liver",), hd95=False)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(StorageError, match="no column 'step'"):
        drop_rows_after(tmp_path / "other.csv", 1)
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    table = MetricsTable(tmp_path / "metrics.csv", CLASSES, hd95=False)
    table.close()
    table._file = type(table._file)(Path("/dev/full"))
    table.on_event(ended(1))
    with pytest.raises(StorageError, match="No space left"):
        table.close()


def test_rows_that_a_full_disk_refused_come_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes 30 bytes of the second row, nothing of the third, and all again from the fourth on."""
    path, table, room = tmp_path / "metrics.csv", MetricsTable(tmp_path / "metrics.csv", CLASSES, hd95=False), [1 << 20]

    def write(number: int, data: bytes, to_disk=os.write) -> int:
        taken = to_disk(number, data[: room[0]]) if room[0] else 0
        room[0] -= taken
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken

    monkeypatch.setattr(os, "write", write)
    table.on_event(ended(1))
    room[0] = 30
    table.on_event(ended(2))
    table.on_event(ended(3))
    assert [row["epoch"] for row in read_metrics(path)] == [1]
    room[0] = 1 << 20
    table.on_event(ended(4))
    table.close()
    assert [row["epoch"] for row in read_metrics(path)] == [1, 2, 3, 4]
    other = MetricsTable(tmp_path / "whole.csv", CLASSES, hd95=False)
    for epoch in range(1, 5):
        other.on_event(ended(epoch))
    assert (tmp_path / "whole.csv").read_bytes() == path.read_bytes()


def test_what_is_no_matter_of_room_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = MetricsTable(tmp_path / "metrics.csv", CLASSES, hd95=False)
    monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EBADF, "Bad file descriptor")))
    with pytest.raises(StorageError, match="Bad file"):
        table.on_event(ended(1))


@given(st.lists(st.text(max_size=12), max_size=8))
def test_slugs_are_safe_and_distinct_whatever_the_names(names: list[str]) -> None:
    slugs = class_slugs(names)
    assert len(set(slugs)) == len(names)
    assert all(slug and not set(slug) & set(',"\r\n ;\t') for slug in slugs)


def test_plain_names_are_their_own_slugs() -> None:
    assert class_slugs(["liver", "left-lung", "left lung", "left_lung", ","]) == [
        *("liver", "left-lung", "left_lung", "left_lung_2", "class"),
    ]


def test_a_killed_writer_leaves_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    script = (
        "import itertools, sys; from pathlib import Path; from fasttrain.telemetry.metrics_csv import MetricsTable\n"
        "from fasttrain.telemetry.events import EpochEnded\n"
        "table = MetricsTable(Path(sys.argv[1]), ('a',), False)\n"
        "for n in itertools.count(1):\n"
        "    table.on_event(EpochEnded(n, n, 1.0, 0.5, 1e-3, 9.0, 0.0))\n"
        "    print(n, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 50:
            break
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    epochs = [row["epoch"] for row in read_metrics(path)]
    assert len(epochs) >= 50
    assert epochs == list(range(1, len(epochs) + 1))

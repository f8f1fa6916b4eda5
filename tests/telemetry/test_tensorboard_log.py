"""TensorBoard's own reader finds what was written, goes over a resume without doubles, and survives a torn end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.errors import MachineError, StorageError
from fasttrain.telemetry.events import EpochEnded, Message, StepLogged, ValidationFigures
from fasttrain.telemetry.tensorboard import TensorBoardLog, require_tensorboard

accumulators = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the package tensorboard is not installed"
)


def step(number: int, loss: float) -> StepLogged:
    return StepLogged(1, number, number, loss, 1e-3, 100.0, 0.25)


def epoch(number: int, dice: float | None = None) -> EpochEnded:
    scores = ValidationFigures(dice, {"liver": dice, "no such": None}, {}, hd95=3.5, hd95_by_class={"liver": 3.5})
    return EpochEnded(number, number * 10, 2.0, 1 / number, 1e-3, 90.0, 0.5, 0.75, 10.5, scores if dice else None)


def read(folder: Path):
    found = accumulators.EventAccumulator(str(folder), size_guidance={accumulators.SCALARS: 0})
    found.Reload()
    return found


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in read(folder).Scalars(tag)]


def written(folder: Path, *events, first_step: int = 0, closed: bool = True) -> TensorBoardLog:
    log = TensorBoardLog(folder, first_step)
    for event in events:
        log.on_event(event)
    if closed:
        log.close()
    return log


def test_scalars_are_read_back_with_their_steps(tmp_path: Path) -> None:
    written(tmp_path, step(5, 2.0), Message("not for this file"), step(10, 1.5), epoch(1), epoch(2, 0.875))
    assert points(tmp_path, "training/loss") == [(5, 2.0), (10, 1.5)]
    assert points(tmp_path, "training/learning_rate") == [(5, pytest.approx(1e-3)), (10, pytest.approx(1e-3))]
    assert points(tmp_path, "speed/patches_per_second") == [(5, 100.0), (10, 100.0)]
    assert points(tmp_path, "speed/wait_share") == [(5, 0.25), (10, 0.25)]
    assert points(tmp_path, "epoch/loss") == [(10, 1.0), (20, 0.5)]
    assert points(tmp_path, "epoch/gpu_gib") == [(10, 10.5), (20, 10.5)]
    assert points(tmp_path, "validation/dice") == [(20, 0.875)]
    assert points(tmp_path, "dice/liver") == [(20, 0.875)]
    assert points(tmp_path, "hd95_mm/liver") == [(20, 3.5)]
    tags = read(tmp_path).Tags()["scalars"]
    assert "dice/no such" not in tags
    assert "gpu/gib" not in tags


def test_what_was_logged_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    log = written(tmp_path, step(5, 2.0), closed=False)
    assert points(tmp_path, "training/loss") == [(5, 2.0)]
    log.close()
    log.close()


def test_a_resume_takes_the_place_of_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    written(tmp_path, step(5, 9.0), step(10, 8.0), epoch(1, 0.5), step(15, 7.0), epoch(2, 0.6))
    written(tmp_path, step(15, 6.0), epoch(2, 0.75), step(25, 5.0), first_step=11)
    assert points(tmp_path, "training/loss") == [(5, 9.0), (10, 8.0), (15, 6.0), (25, 5.0)]
    assert points(tmp_path, "validation/dice") == [(10, 0.5), (20, 0.75)]
    written(tmp_path, step(5, 4.0))
    assert points(tmp_path, "training/loss") == [(5, 4.0)]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_clock_that_was_put_back_does_not_change_the_order(tmp_path: Path) -> None:
    written(tmp_path, step(5, 9.0), step(10, 8.0))
    (ahead,) = tmp_path.iterdir()
    ahead.rename(tmp_path / "events.out.tfevents.9999999998.elsewhere.1")
    written(tmp_path, step(10, 7.0), first_step=6)
    assert points(tmp_path, "training/loss") == [(5, 9.0), (10, 7.0)]


def test_a_torn_end_costs_no_more_than_itself(tmp_path: Path) -> None:
    written(tmp_path, step(5, 2.0), step(10, 1.5))
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 7)
    assert points(tmp_path, "training/loss") == [(5, 2.0)]
    written(tmp_path, step(10, 1.25), first_step=6)
    assert points(tmp_path, "training/loss") == [(5, 2.0), (10, 1.25)]


def test_a_disk_that_refuses_is_named_with_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written: .*output\.tensorboard: false"):
        TensorBoardLog(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = written(tmp_path, closed=False)
    os.dup2((full := os.open("/dev/full", os.O_WRONLY)), log._writer._writer.fileno())
    os.close(full)
    log.on_event(step(5, 2.0))
    with pytest.raises(StorageError, match="No space left"):
        log.close()


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import fasttrain.telemetry.tensorboard as module\n"
        "assert 'tensorboard' not in sys.modules\n"
        "module.TensorBoardLog(Path(sys.argv[1])).close()\n"
        "assert 'tensorboard' in sys.modules and not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_a_missing_package_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_tensorboard()
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MachineError, match=r"pip install 'fasttrain\[tensorboard\]'") as caught:
        require_tensorboard()
    assert caught.value.exit_code == 4
    with pytest.raises(MachineError):
        TensorBoardLog(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()

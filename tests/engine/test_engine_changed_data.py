"""Data that changes under a run is noticed when it goes on; what only moves or is packed anew is not."""

import gzip
import json
import os
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from fasttrain import train
from fasttrain.engine.run import resume
from fasttrain.engine.sound_cases import changed_text
from fasttrain.engine.stop import StopRequest
from fasttrain.telemetry.events import Event, Message, StepLogged


class Told:
    """Hears warnings, and asks for a stop after a step."""

    def __init__(self, stop: StopRequest | None = None) -> None:
        self.stop = stop
        self.warnings: list[str] = []

    def on_event(self, event: Event) -> None:
        if isinstance(event, Message) and event.level == "warning":
            self.warnings.append(event.text)
        if isinstance(event, StepLogged) and event.step == 2 and self.stop is not None:
            self.stop.ask("a test", 143)

    def close(self) -> None: ...


@pytest.fixture
def begun(tiny, phantoms: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run that was stopped after two steps, and the folder of its data."""
    data, run, stop = tmp_path / "data", tmp_path / "run", StopRequest()
    shutil.copytree(phantoms, data)
    # As a set of one's own: phantoms that changed are made anew
    recipe = tiny(training__epochs=1, data__source={"kind": "decathlon"})
    train(recipe, data=data, run=run, device="cpu", observers=[Told(stop)], stop=stop)
    return run, data


def goes_on(run: Path, **more: object) -> list[str]:
    told = Told()
    assert resume(run, observers=[told], **more).summary["status"] == "done"
    return [text for text in told.warnings if "held when the run began" in text]


def files(data: Path, folder: str) -> list[Path]:
    return sorted(path for path in data.rglob("*.nii.gz") if folder in path.parent.name)


@pytest.mark.parametrize("folder", ["images", "labels"])
def test_a_changed_voxel_is_noticed(begun: tuple[Path, Path], folder: str) -> None:
    """A label that is shifted has as many voxels of each class as before."""
    run, data = begun
    path = files(data, folder)[0]
    volume = nib.load(path)
    values = np.asanyarray(volume.dataobj)
    kept = os.stat(path)
    nib.save(nib.Nifti1Image(np.roll(values, 1, axis=0), volume.affine, volume.header), path)
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    (told,) = goes_on(run)
    assert told.startswith("1 case of 6 no longer holds what it held when the run began (")
    assert "training goes on with what is there now" in told
    assert path.name.split(".")[0].removesuffix("_0000") in told


def test_a_grid_that_changed_is_noticed(begun: tuple[Path, Path]) -> None:
    run, data = begun
    for folder in ("images", "labels"):
        path = files(data, folder)[0]
        volume = nib.load(path)
        nib.save(nib.Nifti1Image(np.asanyarray(volume.dataobj), volume.affine @ np.diag([1.1, 1, 1, 1])), path)
    assert len(goes_on(run)) == 1


def test_files_that_were_copied_and_packed_anew_are_the_same(begun: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = begun
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    for path in files(moved, "images"):
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 1))
    shutil.rmtree(data)
    assert goes_on(run, data=moved) == []


def test_a_run_of_before_this_was_kept_is_not_accused(begun: tuple[Path, Path]) -> None:
    run, _ = begun
    plan = json.loads((run / "plan.json").read_text())
    assert len(plan.pop("case_contents")) == 6
    (run / "plan.json").write_text(json.dumps(plan))
    assert goes_on(run) == []


def test_the_sentence_names_three() -> None:
    now = {f"case_{number}": "b" for number in range(9)}
    assert changed_text({}, now) is None
    assert changed_text(now, now) is None
    told = changed_text(dict.fromkeys(list(now)[:5], "a"), now)
    assert told is not None
    assert told.startswith("5 cases of 9 no longer hold what they held when the run began (case_0, case_1, case_2 …):")

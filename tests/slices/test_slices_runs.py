"""A network for planes is trained on the slices of volumes, stopped, resumed, scored again, and writes volumes."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from fasttrain import train
from fasttrain.cli.main import run as command
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import EXIT_DONE, EXIT_TERMINATED
from fasttrain.telemetry.events import Event, StepLogged
from fasttrain.telemetry.metrics_csv import read_metrics

SLICED = {
    "data__slices": {"axis": "axial", "keep_empty": 0.5, "neighbours": 1},
    "data__samples_per_case": 2,
    "patch__size": [16, 24],
    "patch__foreground": 0.3,
    "augment__flip": {"probability": 0.5, "axes": [0, 1]},
    "training__batch_size": 4,
    "training__epochs": 2,
    "validation__mirror": [1],
    "validation__hd95": True,
    "output__pictures": "last",
}


@pytest.fixture(scope="module")
def whole(tiny, phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(tiny(**SLICED), data=phantoms, run=tmp_path_factory.mktemp("runs") / "whole", device="cpu")


def rows_of(run: Path) -> list[tuple[float | None, ...]]:
    return [
        tuple(row[key] for key in ("step", "train_loss", "val_dice", "val_slice_dice", "val_hd95"))
        for row in read_metrics(run / "metrics.csv")
    ]


def test_a_run_is_judged_by_volumes_and_tells_of_slices(whole: RunResult) -> None:
    rows = read_metrics(whole.run / "metrics.csv")
    assert whole.exit_code == EXIT_DONE
    assert whole.summary["best"]["metric"] == "val_dice"
    assert all(0 <= row["val_slice_dice"] <= 1 for row in rows)
    assert rows[-1]["val_slice_dice_liver"] is not None
    assert len(list((whole.run / "pictures").iterdir())) == 2
    plan = json.loads((whole.run / "plan.json").read_text())
    names = {part: set(cases) for part, cases in plan["cases"].items()}
    assert names["training"].isdisjoint(names["validation"])


class StopAtStep:
    def __init__(self, stop: StopRequest, step: int) -> None:
        self.stop, self.step = stop, step

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == self.step:
            self.stop.ask("the test", EXIT_TERMINATED)

    def close(self) -> None:
        pass


def test_a_resumed_run_is_bit_for_bit_the_unbroken_one(tiny, phantoms: Path, whole: RunResult, tmp_path: Path) -> None:
    recipe, stop = tiny(**SLICED, data__cache={"kind": "disk"}), StopRequest()
    broken = train(
        recipe, data=phantoms, run=tmp_path / "broken", device="cpu", stop=stop, observers=[StopAtStep(stop, 3)]
    )
    assert broken.exit_code == EXIT_TERMINATED
    assert resume(tmp_path / "broken", device="cpu").exit_code == EXIT_DONE
    assert rows_of(tmp_path / "broken") == rows_of(whole.run)


def turned_to(image: nib.Nifti1Image, codes: str) -> nib.Nifti1Image:
    own = nib.orientations.io_orientation(image.affine)
    return image.as_reoriented(nib.orientations.ornt_transform(own, nib.orientations.axcodes2ornt(codes)))


def test_evaluate_and_predict_from_the_command(
    whole: RunResult, phantoms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def done(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command([*arguments, "--device", "cpu"])
        assert not ended.value.code
        return capsys.readouterr().out

    found = json.loads(done("evaluate", str(whole.run), "--json"))
    best = read_metrics(whole.run / "metrics.csv")[whole.summary["best"]["epoch"] - 1]
    assert found["dice"] == pytest.approx(best["val_dice"], abs=1e-9)
    assert found["slice_dice"] == pytest.approx(best["val_slice_dice"], abs=1e-9)
    slices = found["slice_counts"]["liver"]
    assert slices > len(found["cases"]), "slices are counted, not cases"
    text = done("evaluate", str(whole.run))
    assert "mean of slices" in text
    # With its interval between the mean and the count
    assert f"mean Dice {best['val_dice']:.4f}" in text
    assert f" over 2 cases, of single slices {best['val_slice_dice']:.4f}" in text

    # A file with its axes in another order and direction is written in its own
    image = nib.load(sorted((phantoms / "imagesTr").iterdir())[-1])
    turned = turned_to(image, "SPL")
    given = tmp_path / "in"
    given.mkdir()
    nib.save(image, given / "as_it_is.nii.gz")
    nib.save(turned, given / "turned.nii.gz")
    done("predict", str(whole.run), str(given), str(tmp_path / "out"))
    one, other = (nib.load(tmp_path / "out" / f"{name}.nii.gz") for name in ("as_it_is", "turned"))
    assert one.shape == image.shape
    assert other.shape == turned.shape
    assert np.allclose(other.affine, turned.affine)
    back = turned_to(other, "".join(nib.aff2axcodes(image.affine)))
    assert np.mean(np.asanyarray(back.dataobj) != np.asanyarray(one.dataobj)) < 1e-3
    assert np.asanyarray(one.dataobj).any()

"""What a recipe may say of slices, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from sliced_cases import write_set

from fasttrain.cli.main import run as command
from fasttrain.engine.outline import outline_of
from fasttrain.engine.resuming.changes import as_values, changes_between, check_changes
from fasttrain.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE, RecipeError
from fasttrain.recipe import resolve


def test_the_bundled_recipe_is_the_scripts_network_and_settings() -> None:
    recipe = resolve("brain-tumor-2d").recipe
    assert outline_of(recipe).parameters == pytest.approx(7.76e6, abs=5e3)
    assert (recipe.patch.size, recipe.box, recipe.input_channels) == ((256, 256), (1, 256, 256), 1)
    training = recipe.training
    assert (training.batch_size, training.epochs, recipe.acceleration.threads) == (16, 120, 4)
    more = [
        "data.slices.neighbours=2",
        "schedule.kind=plateau",
        "training.early_stopping.patience=9",
        "acceleration.amp=bf16",
    ]
    assert resolve("brain-tumor-2d", more).recipe.input_channels == 5
    assert resolve("brain-tumor-2d", ["schedule.kind=one_cycle"]).recipe.schedule.kind == "one_cycle"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["patch.size=[64,64,64]"], "patch.size: has 3 values, and with data.slices a patch lies in a slice; give 2"),
        (
            ["data.spacing=[1,1]"],
            "data.spacing: has 2 values, but data.slices are cut out of volumes, which have 3 axes",
        ),
        (["patch.background_above=0"], "patch.background_above: takes voxels of any slice"),
        (["data.slices.axis=transverse"], "data.slices.axis"),
        (["data.slices.axis=3"], "data.slices.axis"),
        (["data.slices.keep_empty=1.5"], "data.slices.keep_empty"),
        (["data.slices.neighbours=-1"], "data.slices.neighbours"),
        (["data.slices.axes=axial"], "did you mean"),
        (["augment.flip.axes=[2]"], "axis 2 does not exist; a 2D patch has axes 0 to 1"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(settings: list[str], told: str) -> None:
    with pytest.raises(RecipeError) as raised:
        resolve("brain-tumor-2d", settings)
    (fault,) = raised.value.faults
    assert told in fault


def test_background_centres_go_with_all_slices() -> None:
    assert resolve("brain-tumor-2d", ["patch.background_above=0", "data.slices.keep_empty=1"])


def test_a_dose_has_no_slices() -> None:
    with pytest.raises(RecipeError) as raised:
        resolve("openkbp", ["data.slices.axis=axial"])
    assert any("data.slices: is for labels of classes" in fault for fault in raised.value.faults)


@pytest.mark.parametrize("key", ["axis=coronal", "keep_empty=0.5", "neighbours=1"])
def test_a_resume_keeps_the_slices(key: str) -> None:
    then, now = (as_values(resolve("brain-tumor-2d", more).recipe) for more in ([], [f"data.slices.{key}"]))
    with pytest.raises(RecipeError, match=f"data.slices.{key.partition('=')[0]}: a run that goes on keeps it"):
        check_changes(changes_between(then, now), "--set")


PLANES = [
    *("data.source.kind=decathlon", "data.slices=null", "patch.size=[16,16]", "network.features=[4,8,8]"),
    *("network.strides=[2,2]", "data.split.kind=last", "data.split.validation=1", "data.classes={1: tumor}"),
]


def code_of(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    return int(ended.value.code or 0)


def sets(settings: list[str]) -> list[str]:
    return [part for one in settings for part in ("--set", one)]


@pytest.mark.parametrize("name", ["check", "train"])
def test_volumes_without_slices_are_one_sentence_and_exit_code_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_set(tmp_path / "set", 3)
    more = [] if name == "check" else ["--run", str(tmp_path / "run"), "--device", "cpu"]
    assert code_of([name, "--recipe", "brain-tumor-2d", "--data", str(root), *sets(PLANES), *more]) == EXIT_USAGE
    (line,) = (one for one in capsys.readouterr().err.splitlines() if one.startswith("fasttrain: "))
    assert "patch.size is [16, 16], for plane images, but all images are volumes" in line
    assert "18×20×7); set data.slices.axis=axial, coronal or sagittal" in line
    assert not (tmp_path / "run").exists()


def test_volumes_are_checked_with_slices_and_planes_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_set(tmp_path / "set", 3)
    cut = [one for one in PLANES if one != "data.slices=null"]
    assert code_of(["check", "--recipe", "brain-tumor-2d", "--data", str(root), "--json", *sets(cut)]) == EXIT_DONE
    assert json.loads(capsys.readouterr().out)["figures"]["smallest"]["shape"] == [7, 18, 20]
    planes = tmp_path / "planes"
    for number in range(3):
        for folder, values in (("imagesTr", np.random.rand(20, 24)), ("labelsTr", np.eye(20, 24))):
            (planes / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values.astype(np.float32), np.eye(4)), planes / folder / f"case_{number}.nii.gz")
    (planes / "dataset.json").write_text((root / "dataset.json").read_text())
    assert code_of(["check", "--recipe", "brain-tumor-2d", "--data", str(planes), *sets(PLANES)]) == EXIT_DONE
    assert code_of(["check", "--recipe", "brain-tumor-2d", "--data", str(planes), *sets(cut)]) == EXIT_USAGE
    assert "data.slices cuts volumes, and all images are planes (" in capsys.readouterr().err
    # Some volumes among planes are faults of these cases
    nib.save(nib.load(root / "imagesTr" / "case_1.nii.gz"), planes / "imagesTr" / "case_1.nii.gz")
    capsys.readouterr()
    assert code_of(["check", "--recipe", "brain-tumor-2d", "--data", str(planes), *sets(PLANES)]) == EXIT_DATA
    assert (
        "if it is a volume give patch.size three values or cut it with data.slices"
        in capsys.readouterr().out.replace("\n", " ")
    )


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_switch_is_no_axis(value: str) -> None:
    with pytest.raises(
        RecipeError, match=f"data.slices.axis: found '{value}', expected one of axial, coronal, sagittal, 0, 1, 2"
    ):
        resolve("brain-tumor-2d", [f"data.slices.axis={value}"])
    assert resolve("brain-tumor-2d", ["data.slices.axis=1"]).recipe.data.slices.axis == 1


@pytest.mark.parametrize("name", ["spleen", "hippocampus", "brain-tumor", "heart", "demo"])
def test_a_plane_of_a_patch_for_volumes_is_blamed_first(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(name, ["patch.size=[32, 32]"])
    assert caught.value.faults[0].startswith("--set patch.size: has 2 values, but ")


def test_a_recipe_for_planes_is_blamed_for_nothing() -> None:
    values = [
        "patch.size=[32, 32]",
        "data.spacing=null",
        "augment.flip={probability: 0.5, axes: [0, 1]}",
        "validation.mirror=[0]",
    ]
    assert resolve("hippocampus", values).recipe.dimensions == 2

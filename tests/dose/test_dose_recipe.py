"""What a recipe for a dose may say, and what it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.cli.main import run as command
from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve

WITHOUT_RIGHT = "data.classes={1: Brainstem, 2: LeftParotid, 3: PTV70}"


@pytest.mark.parametrize(
    ("recipe", "values", "told"),
    [
        (
            "openkbp",
            ["loss.kind=dice_ce"],
            "loss.kind: dice_ce is no loss of task: dose; use one of masked_mae, masked_mse",
        ),
        ("demo", ["loss.kind=masked_mae"], "loss.kind: masked_mae is no loss of task: segmentation"),
        ("demo", ["task=dose"], "data.source.kind: is phantom, but task: dose takes openkbp"),
        ("openkbp", ["task=segmentation"], "data.source.kind: is openkbp, but task: segmentation takes one of labels"),
        ("demo", ["data.split={kind: provided}"], "data.split.kind: provided is for data.source.kind: openkbp"),
        ("demo", ["data.dose_scale=60"], "data.dose_scale: is for task: dose"),
        ("demo", ["network={kind: dose_unet}"], "network.kind: dose_unet is for task: dose"),
        ("openkbp", ["data.channels=[CT, MR]"], "data.channels: are 2, and an OpenKBP patient has one"),
        (
            "openkbp",
            ["data.classes={1: Brainstem, 3: PTV70}"],
            "data.classes: of task: dose are numbered from 1 on without gaps",
        ),
        ("openkbp", ["data.classes={1: Brainsten}"], "'Brainsten' is no structure of OpenKBP; did you mean Brainstem"),
        ("openkbp", ["data.label_map={2: 1}"], "data.label_map: is for labels of class values"),
        ("openkbp", ["validation.hd95=true"], "validation.hd95: is a distance of classes"),
        ("openkbp", ["patch.size=[100, 128, 128]"], "patch.size[0]: 100 is not a multiple of 64; use 64 or 128"),
        (
            "openkbp",
            [WITHOUT_RIGHT],
            "data.classes[2]: LeftParotid has no partner RightParotid that it could change places with in patches mirrored along "
            "axis 1",
        ),
        (
            "openkbp",
            [WITHOUT_RIGHT, "augment.flip=null", "validation.mirror=[1]"],
            "LeftParotid has no partner RightParotid",
        ),
    ],
)
def test_what_cannot_be(recipe: str, values: list[str], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, values)
    assert told in "\n".join(caught.value.faults)
    assert caught.value.exit_code == 2


def test_what_can() -> None:
    recipe = resolve("openkbp").recipe
    assert (recipe.input_channels, recipe.stored_channels, recipe.output_channels) == (11, 2, 1)
    assert recipe.sides == ((3, 2),)
    assert recipe.left_right_axis == 1
    assert resolve("openkbp", ["data.orientation=RAS"]).recipe.left_right_axis == 0
    assert resolve("openkbp", ["data.orientation=SAL"]).recipe.left_right_axis == 2
    resolve("openkbp", [WITHOUT_RIGHT, "augment.flip.axes=[0]"])
    resolve("openkbp", ["network={kind: dynunet}", "loss.kind=masked_mse"])
    assert resolve("demo").recipe.task_facts.rising(0.5) == 0.5
    task = recipe.task_facts
    assert task.better(2.0, 3.0)
    assert not task.better(3.0, 2.0)
    assert task.better(9.0, None)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ("data.regions={targets: [8, 9, 10]}", "regions"),
        ("data.label_map={2: 1}", "label_map"),
        ("data.ignore_label=0", "ignore_label"),
    ],
)
def test_what_is_for_labels_alone_is_one_sentence(values: str, key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve("openkbp", [values])
    assert caught.value.faults == (
        f"--set data.{key}: is for labels of class values, and task: dose has structures that overlap; leave it out",
    )


def test_a_dry_run_speaks_of_structures(patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Small, and without what a CPU would measure
    sets = ["patch.size=[32, 32, 32]", "network.features=[4, 8]", "data.workers=0", "acceleration.threads=1"]
    sets += ["data.spacing=[16, 16, 10]", "acceleration.amp=off", "acceleration.channels_last=off"]
    words = ["train", "--recipe", "openkbp", "--data", str(patients), "--dry-run", "--device", "cpu"]
    words += [word for one in sets for word in ("--set", one)]
    with pytest.raises(SystemExit) as ended:
        command(words)
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "32×32×32, 1 channel, 10 structures" in told
    assert "background" not in told

"""What a recipe cannot ask of networks and losses is found by `recipes validate`, without torch and in one sentence each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve

SWIN = ["network.kind=swinunetr", "patch.size=[64,64,64]"]
SEG = ["network.kind=segresnet"]
BY_NAME = ["network.kind=monai", "network.name=UNETR"]


def faults(*assignments: str) -> list[str]:
    try:
        resolve("demo", assignments)
    except RecipeError as error:
        return [fault.partition("--set ")[2] or fault.split(": ", 1)[1] for fault in error.faults]
    return []


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ([*SWIN, "network.feature_size=20"], ["network.feature_size: 20 is not a multiple of 12; use 12 or 24"]),
        ([*SWIN, "network.feature_size=6"], ["network.feature_size: 6 is not a multiple of 12; use 12"]),
        (
            ["network.kind=swinunetr", "patch.size=[36,64,16]"],
            [
                "patch.size[0]: 36 is not a multiple of 32; use 32 or 64",
                "patch.size[2]: 16 is not a multiple of 32; use 32",
            ],
        ),
        (
            ["network.kind=swinunetr", "patch.size=[32,32,32]"],
            [
                "patch.size: leaves one voxel at the lowest stage, too few for network.norm: instance; use a larger "
                "patch, such as [64, 64, 64]"
            ],
        ),
        (
            ["network.kind=swinunetr", "network.norm=batch", "patch.size=[32,32,32]", "training.batch_size=1"],
            [
                "patch.size: leaves one voxel at the lowest stage, too few for network.norm: batch with a "
                "training.batch_size of 1; use a larger patch, such as [64, 64, 64], or a larger batch"
            ],
        ),
        (
            [*SWIN, "network.num_heads=[3,6,12,25]"],
            ["network.num_heads[3]: 25 heads do not divide the 192 features of that stage"],
        ),
        ([*SWIN, "network.depths=[2,2,2]"], ["network.depths: should have at least 4 values, found 3"]),
        (
            [*SEG, "network.init_filters=12"],
            ["network.init_filters: 12 is not a multiple of 8, the groups of network.norm: group; use 8 or 16"],
        ),
        (
            [*SEG, "network.blocks_up=[1,1]"],
            ["network.blocks_up: has 2 entries for 4 stages; 3 are needed, one between each two"],
        ),
        ([*SEG, "patch.size=[36,48,48]"], ["patch.size[0]: 36 is not a multiple of 8; use 32 or 40"]),
        (["network.kernels=4"], [f"network.kernels: 4 on axis {axis} is even; use an odd kernel such as 5" for axis in range(3)]),
        (
            ["network.kernels=[3,3,1]", "network.strides=[2,2,[2,2,3]]"],
            [
                "network.strides[2]: 3 on axis 2 is too large for a kernel of 1; use at most 2, or a larger network.kernels"
            ],
        ),
        (
            ["network.kind=monai", "network.name=os.path"],
            ["network.name: should be the name of a class in monai.networks.nets such as UNETR, found 'os.path'"],
        ),
        (["network.kind=monai"], ["network.name: is missing"]),
        (
            [*BY_NAME, "network.arguments={a: 2020-01-01}"],
            [
                "network.arguments: a should be a number, text, true, false, null or a list of those, found "
                "datetime.date(2020, 1, 1)"
            ],
        ),
        ([*BY_NAME, "network.arguments={a: {b: [1, .inf]}}"], ["network.arguments: a.b[1] should be a finite number, found inf"]),
        (
            ["loss.kind=bce_dice"],
            ["loss.kind: bce_dice is for one foreground class, and data.classes has 2; use dice_ce, or declare one class"],
        ),
        (["loss.kind=tversky", "loss.alpha=0", "loss.beta=0"], ["loss: alpha and beta are both 0; at least one must be above"]),
        (
            ["loss.kind=dice_focal", "loss.dice_weight=0", "loss.focal_weight=0"],
            ["loss: dice_weight and focal_weight are both 0; at least one must be above"],
        ),
        (
            ["loss.dice_weight=0", "loss.ce_weight=0"],
            ["loss: dice_weight and ce_weight are both 0; at least one must be above"],
        ),
        (["loss.kind=bce_dice", "loss.include_background=true"], ["loss.include_background: no such key"]),
        (
            ["schedule.kind=one_cycle", "schedule.start_divisor=0.5"],
            ["schedule.start_divisor: should be greater than or equal to 1"],
        ),
        (["optimizer.kind=novograd", "optimizer.momentum=0.9"], ["optimizer.momentum: no such key"]),
    ],
)  # fmt: skip
def test_faults(assignments: list[str], expected: list[str]) -> None:
    found = faults(*assignments)
    lines = [line for line in found if any(text in line for text in expected)]
    assert len(lines) == len(found) == len(expected), found


@pytest.mark.parametrize(
    "assignments",
    [
        SWIN,
        SEG,
        [*SEG, "network.norm=batch", "network.init_filters=12"],
        BY_NAME,
        [*BY_NAME, "network.arguments={norm_name: [group, {num_groups: 4}], feature_size: 8, x: null}", "patch.size=[47,48,48]"],
        ["network.kind=swinunetr", "network.norm=batch", "patch.size=[32,32,32]"],
        ["network.kind=swinunetr", "patch.size=[32,32,64]"],
        ["loss.kind=tversky", "loss.alpha=0"],
        ["loss.kind=generalised_dice", "schedule.kind=one_cycle", "optimizer.kind=novograd"],
        ["loss.kind=dice_focal", "loss.alpha=0.25", "optimizer.kind=adam"],
    ],
)  # fmt: skip
def test_sound_recipes_stay_sound_and_survive_being_written_out(assignments: list[str], tmp_path: Path) -> None:
    assert faults(*assignments) == []
    resolved = resolve("demo", assignments)
    (tmp_path / "written.yaml").write_text(resolved.as_yaml())
    assert resolve(str(tmp_path / "written.yaml")).recipe.model_dump(mode="json") == resolved.recipe.model_dump(
        mode="json"
    )


def test_output_channels() -> None:
    assert resolve("demo").recipe.output_channels == 3
    assert resolve("spleen").recipe.output_channels == 2
    assert resolve("spleen", ["loss.kind=bce_dice"]).recipe.output_channels == 1


def test_torch_is_not_loaded_to_find_them() -> None:
    code = (
        "import sys; from fasttrain.recipe import resolve; "
        "resolve('demo', ['network.kind=monai', 'network.name=UNETR', 'loss.kind=dice_focal']); "
        "sys.exit('torch' in sys.modules or 'monai' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

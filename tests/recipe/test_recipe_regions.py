"""`data.regions` in recipes: what they mean, and every way in which they can be wrong, each in one sentence with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.cli.main import run as command
from fasttrain.engine.resuming.changes import as_values, changes_between, check_changes
from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve
from fasttrain.recipe.regions import Regions

BRATS = {"whole": [1, 2, 3, 4], "core": [1, 3, 4], "enhancing": [4]}


def changed(regions: object, **more: object):
    classes = {1: "necrosis", 2: "oedema", 3: "non_enhancing", 4: "enhancing"}
    settings = {"data.classes": classes, "data.regions": regions, "data.intensity": {"kind": "none"}}
    return resolve("brain-tumor", {**settings, **{key.replace("__", "."): value for key, value in more.items()}}).recipe


def faults(regions: object, **more: object) -> str:
    with pytest.raises(RecipeError) as caught:
        changed(regions, **more)
    return "\n".join(caught.value.faults)


def test_what_the_bundled_regions_mean() -> None:
    recipe = resolve("brain-tumor").recipe
    assert recipe.regions == Regions(("whole", "core", "enhancing"), ((1, 2, 3), (2, 3), (3,)), (1, 2, 3))
    assert recipe.data.scored_names == ("whole", "core", "enhancing")
    assert (recipe.output_channels, recipe.answer_channels, recipe.data.class_count) == (3, 3, 4)
    assert [recipe.regions.last_of(index) for index in range(4)] == [0, 1, 2, 3]


def test_a_region_writes_its_first_value_that_no_later_one_has() -> None:
    assert changed(BRATS).regions.written == (2, 1, 4)
    assert changed({**BRATS, "core": [3, 1, 4]}).regions.written == (2, 3, 4)
    # Regions beside each other, and one that later ones cover together
    assert changed({"all": [1, 2, 3, 4], "low": [1, 2], "high": [3, 4]}).regions.written == (1, 1, 3)


def test_values_of_the_files_become_class_indices() -> None:
    recipe = changed({"whole": [7, 200], "core": [200]}, data__classes={7: "edge", 200: "core"})
    assert (recipe.regions.members, recipe.regions.written) == (((1, 2), (2,)), (1, 2))


def test_without_regions_nothing_changes() -> None:
    recipe = resolve("spleen").recipe
    assert (recipe.regions, recipe.data.scored_names, recipe.output_channels) == (None, ("spleen",), 2)
    one = resolve("spleen", {"loss": {"kind": "bce_dice"}}).recipe
    assert (one.output_channels, one.answer_channels) == (1, 2)


def test_one_region_has_one_channel_of_its_own() -> None:
    recipe = changed({"all": [1, 2, 3, 4]}, loss={"kind": "bce_dice"})
    assert (recipe.output_channels, recipe.answer_channels) == (1, 1)


@pytest.mark.parametrize(
    ("regions", "sentence"),
    [
        (
            {**BRATS, "more": [7]},
            r"data.regions.more: holds 7, which is no value of data.classes (1 necrosis, 2 oedema, ",
        ),
        (
            {**BRATS, "none": []},
            "data.regions.none: has no label value; list those that it is made of, or leave it out",
        ),
        ({"air": [0, 1, 2, 3, 4]}, "data.regions.air: holds 0, the background, which is in no region; take it out"),
        ({**BRATS, "core": [1, 3, 3, 4]}, "data.regions.core: holds 3 twice; once is enough"),
        (
            {**BRATS, "Core ": [3]},
            "data.regions.Core : has the name of another region, 'core'; name one of them otherwise",
        ),
        (
            {**BRATS, "inner": [4]},
            "data.regions.inner: holds the same values as enhancing, so that both are one region",
        ),
        ({**BRATS, " ": [3]}, "has a blank name"),
        (
            {"enhancing": [4], "whole": [1, 2, 3, 4]},
            "data.regions.enhancing: lies wholly inside whole, which comes after it and would be drawn over it in predictions; "
            "put enhancing after whole",
        ),
        (
            {"core": [1, 3, 4]},
            "data.regions: hold no 2 (oedema), which would be background; add it to a region, or map it to 0",
        ),
        ({f"r{number}": [1, 2, 3, 4] for number in range(31)}, "data.regions: are 31, and there is room for 30"),
        ({"whole": 4}, "data.regions.whole: should be a list, found 4"),
    ],
)
def test_a_wrong_region_is_one_sentence(regions: dict, sentence: str) -> None:
    assert sentence in faults(regions)


def test_all_faults_are_told_at_once() -> None:
    told = faults({"a": [], "b": [9], "c": [0]})
    assert all(word in told for word in ("regions.a", "regions.b", "regions.c"))


def test_the_ignore_label_is_in_no_region() -> None:
    assert "holds 255, the ignore label" in faults({**BRATS, "core": [1, 3, 4, 255]}, data__ignore_label=255)


@pytest.mark.parametrize("kind", ["dice_ce", "cross_entropy"])
def test_a_loss_of_a_softmax_is_refused(kind: str) -> None:
    assert f"loss.kind: {kind} takes the softmax of classes that exclude each other" in faults(
        BRATS, loss={"kind": kind}
    )


def test_a_background_channel_is_refused() -> None:
    told = faults(BRATS, loss={"kind": "dice", "include_background": True})
    assert "loss.include_background: has no meaning with data.regions" in told


def test_doses_have_no_regions() -> None:
    with pytest.raises(RecipeError, match="data.regions: is for labels of class values, and task: dose has structures"):
        resolve("openkbp", {"data.regions": {"targets": [8, 9, 10]}})


def test_the_lowest_value_is_background_only_where_background_is_left_out() -> None:
    with pytest.raises(RecipeError, match="data.intensity.background: is left out by nonzero: true alone"):
        resolve("brain-tumor", {"data.intensity": {"kind": "zscore", "background": "lowest"}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{whole: [1, 2, 3], whole: [1]}", "duplicate key"),
        ("{whole: [1, 2, 3], core: [5]}", "data.regions.core: holds 5, which is no value of data.classes"),
    ],
)
def test_the_command_ends_with_exit_code_2(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["train", "--recipe", "brain-tumor", "--data", str(tmp_path), "--set", f"data.regions={text}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in error
    assert len(error.strip().splitlines()) == 1


def test_regions_are_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: brain-tumor\nname: mine\ndata: {regions: {tumour: [1, 2, 3]}}\n")
    assert resolve(str(path)).recipe.data.scored_names == ("tumour",)


def test_a_run_that_goes_on_keeps_its_regions() -> None:
    then, now = (as_values(changed(regions)) for regions in (BRATS, {**BRATS, "dead": [1]}))
    with pytest.raises(RecipeError, match="data.regions: a run that goes on keeps it"):
        check_changes(changes_between(then, now), "--set")
    assert changes_between(then, then) == []


def test_their_order_is_a_change_too() -> None:
    apart = {"low": [1, 2], "high": [3, 4]}
    then, now = (as_values(changed(regions)) for regions in (apart, dict(reversed(apart.items()))))
    assert [change.key for change in changes_between(then, now)] == ["data.regions"]


def test_regions_that_overlap_otherwise_know_each_class_by_its_regions() -> None:
    crossing = changed({"a": [1, 2], "b": [2, 3], "c": [4]}).regions
    assert (crossing.written, crossing.exact) == ((1, 2, 4), ((0b10, 3),))
    assert changed(BRATS).regions.exact == ()
    assert changed({"all": [1, 2, 3, 4], "low": [1, 2], "high": [3, 4]}).regions.exact == ()

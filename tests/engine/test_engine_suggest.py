"""Suggested recipes: made sets of every kind give one that validates, says what was found, and trains."""

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasttrain import train
from fasttrain.engine.suggest import suggest
from fasttrain.errors import DataError
from fasttrain.recipe import resolve
from fasttrain.recipe.data_spec import KFoldSplit, SameSplit, WindowIntensity, ZScoreIntensity

SHORT = {
    "training.epochs": 1,
    "training.iterations_per_epoch": 2,
    "acceleration.amp": "off",
    "acceleration.channels_last": "off",
    "acceleration.threads": 1,
    "output.plots": False,
    "data.workers": 0,
}


def save(path: Path, values: np.ndarray, spacing=(1.0, 1.0, 1.0), directions=(1, 1, 1)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.diag([*np.multiply(spacing, directions), 1.0])), path)


def make_label(shape, values=(1, 2), seed=0) -> np.ndarray:
    label = np.zeros(shape, np.uint8)
    rng = np.random.default_rng(seed)
    for value in values:
        place = tuple(slice(s, s + max(n // 4, 1)) for n in shape for s in [int(rng.integers(0, max(n - n // 4, 1)))])
        label[place] = value
    return label


def make_image(label: np.ndarray, kind: str, channels: int = 1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = label.shape if channels == 1 else (*label.shape, channels)
    noise = rng.normal(size=shape)
    where = (label > 0) if channels == 1 else (label > 0)[..., None]
    if kind == "ct":
        image = np.where(where, 60, -80) + 20 * noise
        image[0] = -1000
        return image.astype(np.int16)
    return (np.where(where, 300, 100) + 20 * noise).astype(np.float32)


def make_set(
    root: Path,
    cases=6,
    shape=(24, 20, 16),
    spacing=(1.0, 1.0, 1.0),
    values=(1, 2),
    kind="mr",
    channels=1,
    directions=(1, 1, 1),
    **document,
) -> Path:
    """A Decathlon folder; keywords are further entries of its JSON."""
    entries = []
    for number in range(cases):
        label = make_label(shape, values, number)
        names = {"image": f"imagesTr/c{number:02d}.nii.gz", "label": f"labelsTr/c{number:02d}.nii.gz"}
        save(root / names["image"], make_image(label, kind, channels, number), spacing, directions)
        save(root / names["label"], label, spacing, directions)
        entries.append(names)
    (root / "dataset.json").write_text(json.dumps({"training": entries, **document}))
    return root


def suggested(root: Path, gpu_gib: float | None = 12.0):
    """The suggestion, whose text is resolved as the recipe file that a user has."""
    target = root.parent / f"{root.name}.yaml"
    made = suggest(root, root.name, target, gpu_gib)
    target.write_text(made.text)
    recipe = resolve(str(target)).recipe
    assert recipe == made.recipe
    return made


def train_shortly(root: Path, **more) -> None:
    resolved = resolve(str(root.parent / f"{root.name}.yaml"), {**SHORT, **more})
    result = train(resolved, data=root, run=root.parent / "run", device="cpu")
    assert result.exit_code == 0
    assert result.summary["status"] == "done"


def test_mr_is_normalised_image_by_image_and_ct_by_a_window_of_its_structures(tmp_path: Path):
    mr = suggested(make_set(tmp_path / "mr")).recipe
    assert isinstance(mr.data.intensity, ZScoreIntensity)
    ct = suggested(make_set(tmp_path / "ct", kind="ct"))
    window = ct.recipe.data.intensity
    assert isinstance(window, WindowIntensity)
    labelled = np.concatenate(
        [
            nib.load(tmp_path / f"ct/imagesTr/c{n:02d}.nii.gz").get_fdata()[
                nib.load(tmp_path / f"ct/labelsTr/c{n:02d}.nii.gz").get_fdata() > 0
            ]
            for n in range(6)
        ]
    )
    assert (window.low, window.high) == pytest.approx(np.percentile(labelled, (0.5, 99.5)), abs=1.01)
    assert "look like Hounsfield units" in ct.text


def test_what_the_json_says_of_the_modality_goes_before_the_values(tmp_path: Path):
    named = suggested(make_set(tmp_path / "named", modality={"0": "CT"}))
    assert isinstance(named.recipe.data.intensity, WindowIntensity)
    assert named.recipe.data.channels == ("CT",)
    other = suggested(make_set(tmp_path / "other", kind="ct", modality={"0": "PET"}))
    assert isinstance(other.recipe.data.intensity, ZScoreIntensity)
    assert any("look like Hounsfield units" in text for text in other.warnings())


def test_labelled_ct_of_one_value_gets_no_window(tmp_path: Path):
    root = make_set(tmp_path / "flat", cases=2, modality={"0": "CT"})
    for path in (root / "imagesTr").iterdir():
        save(path, np.full((24, 20, 16), 7, np.int16))
    assert isinstance(suggested(root).recipe.data.intensity, ZScoreIntensity)


def test_zeros_around_the_head_are_left_out_of_the_statistics(tmp_path: Path):
    root = make_set(tmp_path / "skull")
    assert suggested(root).recipe.data.intensity == ZScoreIntensity(kind="zscore", nonzero=False)
    for path in (root / "imagesTr").iterdir():
        values = nib.load(path).get_fdata().astype(np.float32)
        values[:8] = values[:, :6] = 0
        save(path, values)
    assert suggested(root).recipe.data.intensity == ZScoreIntensity(kind="zscore", nonzero=True)


def test_classes_have_the_names_of_the_json_and_all_values_that_were_found(tmp_path: Path):
    root = make_set(tmp_path / "gap", values=(1, 2, 4), labels={"0": "background", "1": "oedema: left", "3": "ghost"})
    made = suggested(root)
    assert made.recipe.data.classes == {1: "oedema: left", 2: "class_2", 3: "ghost", 4: "class_4"}
    assert any("ghost" in text for text in made.warnings())
    assert "in no label" in made.text


def test_label_values_with_gaps_train(tmp_path: Path):
    root = make_set(tmp_path / "brats", cases=3, values=(1, 2, 4), channels=2, shape=(16, 16, 16))
    made = suggested(root, gpu_gib=0)
    assert set(made.recipe.data.classes) == {1, 2, 4}
    assert made.recipe.data.channels == ("channel_0", "channel_1")
    train_shortly(root)


def test_a_label_value_that_no_recipe_can_declare_is_told_with_its_file(tmp_path: Path):
    root = make_set(tmp_path / "wide", cases=3)
    label = nib.load(root / "labelsTr/c01.nii.gz").get_fdata().astype(np.int16)
    save(root / "labelsTr/c01.nii.gz", np.where(label == 2, 1000, label).astype(np.int16))
    with pytest.raises(DataError) as refused:
        suggest(root, "wide", Path("wide.yaml"), 12)
    (fault,) = refused.value.faults
    assert "c01.nii.gz has the undeclared label value 1000 in" in fault
    assert "1 to 255" in fault
    assert len(fault) < 400


def test_a_coarse_axis_is_not_pooled_at_once_wherever_it_lies_in_the_file(tmp_path: Path):
    root = tmp_path / "coarse"
    for number in range(5):
        label = make_label((12, 64, 60), seed=number)
        # The file's first axis runs from foot to head: RAS has it last
        affine = np.array([[0, 1.0, 0, 0], [0, 0, 1.0, 0], [5.0, 0, 0, 0], [0, 0, 0, 1]])
        for folder, values in (("images", make_image(label, "mr")), ("labels", label)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, affine), root / folder / f"c{number}.nii.gz")
    made = suggested(root)
    assert made.recipe.data.spacing == (1.0, 1.0, 5.0)
    assert made.plan.coarse_axis == 2
    assert made.plan.median_shape == (64, 60, 12)
    assert made.recipe.network.strides[0] == (2, 2, 1)
    assert made.recipe.patch.size[2] == 12
    assert made.recipe.augment.rotate.degrees == 5
    assert "coarse axis in the first 2 of the stages" in made.text
    train_shortly(root, **{"network.features": [4] * len(made.recipe.network.features)})


def test_planes_give_a_2d_recipe_that_trains(tmp_path: Path):
    root = tmp_path / "planes"
    for number in range(4):
        label = make_label((40, 32, 1), seed=number)
        save(root / "images" / f"p{number}_img.nii.gz", make_image(label, "mr"), (0.5, 0.5, 1))
        save(root / "labels" / f"p{number}_seg.nii.gz", label, (0.5, 0.5, 1))
    made = suggested(root, gpu_gib=0)
    assert made.recipe.patch.size == (40, 32)
    assert made.recipe.data.spacing == (0.5, 0.5)
    assert made.recipe.augment.flip.axes == (0, 1)
    train_shortly(root)


def test_classes_told_apart_by_side_are_not_mirrored(tmp_path: Path):
    sides = {"labels": {"0": "background", "1": "kidney_left", "2": "kidney_right"}}
    made = suggested(make_set(tmp_path / "sides", **sides))
    assert made.recipe.augment.flip.axes == (1, 2)
    assert 0 not in made.recipe.validation.mirror
    one_side = suggested(make_set(tmp_path / "one", labels={"1": "left atrium", "2": "wall"}))
    assert one_side.recipe.augment.flip.axes == (0, 1, 2)
    flat = suggested(make_set(tmp_path / "flat", shape=(20, 24, 1), **sides))
    assert flat.recipe.augment.flip is None


@pytest.mark.parametrize(("cases", "folds"), [(2, 2), (4, 4), (5, 5), (9, 5)])
def test_few_cases_get_fewer_folds(tmp_path: Path, cases: int, folds: int):
    split = suggested(make_set(tmp_path / "few", cases=cases, shape=(10, 10, 10))).recipe.data.split
    assert isinstance(split, KFoldSplit)
    assert split.folds == folds


def test_two_tiny_cases_train(tmp_path: Path):
    root = make_set(tmp_path / "two", cases=2, shape=(9, 7, 5))
    suggested(root, gpu_gib=0)
    train_shortly(root)


def test_a_single_case_trains_and_validates_and_is_said_to(tmp_path: Path):
    root = make_set(tmp_path / "single", cases=1, shape=(16, 16, 16))
    made = suggested(root, gpu_gib=0)
    assert isinstance(made.recipe.data.split, SameSplit)
    assert any("one case" in text for text in made.warnings())
    train_shortly(root)


def test_many_classes(tmp_path: Path):
    values = tuple(range(1, 31))
    made = suggested(make_set(tmp_path / "many", cases=2, values=values))
    assert set(made.recipe.data.classes) <= set(values)
    assert len(made.recipe.data.classes) > 20


def test_nan_voxels_are_said_and_filled(tmp_path: Path):
    root = make_set(tmp_path / "nan", cases=3)
    assert suggested(root).recipe.data.nan_policy == "refuse"
    values = nib.load(root / "imagesTr/c02.nii.gz").get_fdata().astype(np.float32)
    values[0, 0, 0] = np.nan
    save(root / "imagesTr/c02.nii.gz", values)
    made = suggested(root)
    assert made.recipe.data.nan_policy == "replace"
    assert made.found.non_finite == ("c02",)
    assert any("c02" in text for text in made.warnings())


def test_all_faults_of_all_cases_are_told_at_once(tmp_path: Path):
    root = make_set(tmp_path / "bad", cases=4)
    whole = (root / "imagesTr/c00.nii.gz").read_bytes()
    (root / "imagesTr/c00.nii.gz").write_bytes(whole[: len(whole) // 2])
    save(root / "labelsTr/c00.nii.gz", np.full((24, 20, 16), 0.5, np.float32))
    save(root / "labelsTr/c02.nii.gz", np.ones((5, 5, 5), np.uint8))
    with pytest.raises(DataError) as refused:
        suggest(root, "bad", Path("bad.yaml"), 12)
    assert len(refused.value.faults) == 3
    for part in ("c00.nii.gz is damaged", "no whole numbers", "c02.nii.gz has the shape 5×5×5"):
        assert any(part in fault for fault in refused.value.faults)


def test_labels_of_nothing_are_refused(tmp_path: Path):
    root = make_set(tmp_path / "void", cases=2, values=())
    with pytest.raises(DataError, match="nothing to learn"):
        suggest(root, "void", Path("void.yaml"), 12)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(2, 40), st.integers(2, 40), st.integers(1, 24)),
    spacing=st.tuples(*[st.floats(0.1, 8.0)] * 3),
    directions=st.tuples(*[st.sampled_from([-1, 1])] * 3),
    values=st.sets(st.integers(1, 255), min_size=1, max_size=6),
    kind=st.sampled_from(["ct", "mr"]),
    channels=st.integers(1, 3),
    cases=st.integers(1, 6),
    gpu_gib=st.sampled_from([0.0, 8.0, 80.0]),
    names=st.lists(st.text(max_size=12), min_size=6, max_size=6),
)
def test_any_made_set_gives_a_recipe_that_validates(
    tmp_path_factory, shape, spacing, directions, values, kind, channels, cases, gpu_gib, names
):
    root = tmp_path_factory.mktemp("made") / "set"
    labels = {str(value): name for value, name in zip(sorted(values), names, strict=False)}
    make_set(root, cases, shape, spacing, sorted(values), kind, channels, directions, labels=labels)
    made = suggested(root, gpu_gib)
    found = {
        int(value)
        for path in (root / "labelsTr").iterdir()
        for value in np.unique(np.asarray(nib.load(path).dataobj))
        if value
    }
    assert set(made.recipe.data.classes) == values
    assert set(made.found.voxels_by_value) == found
    assert made.recipe.dimensions == (2 if shape[2] == 1 else 3)
    assert len(made.recipe.data.channels) == channels
    assert all(len(line) <= 120 or line.startswith(("# Train it", "  source")) for line in made.text.splitlines())


def test_what_the_set_calls_ignore_is_ignored_and_no_class(tmp_path: Path):
    labels = {"background": 0, "liver": 1, "kidney": 2, "ignore": 255}
    suggestion = suggested(make_set(tmp_path / "set", values=(1, 2, 255), labels=labels), gpu_gib=0)
    assert suggestion.recipe.data.ignore_label == 255
    assert suggestion.recipe.data.classes == {1: "liver", 2: "kidney"}
    assert 255 not in suggestion.found.voxels_by_value
    assert not any("ignore" in text for text in suggestion.warnings())


def test_a_stray_label_value_is_told(tmp_path: Path):
    root = make_set(tmp_path / "set")
    path = sorted(root.rglob("*label*/*.nii.gz"))[0]
    image = nib.load(path)
    label = np.asarray(image.dataobj).copy()
    label[tuple(np.argwhere(label == 0)[0])] = 7
    nib.save(nib.Nifti1Image(label, image.affine), path)
    (text,) = [text for text in suggest(root, "mine", tmp_path / "mine.yaml", gpu_gib=0).warnings() if "slip" in text]
    assert "the label value 7 occurs in case" in text
    assert "in 1 voxel of" in text


def test_a_lone_image_stands_beside_a_damaged_one(tmp_path: Path):
    root = make_set(tmp_path / "set")
    labels = sorted(root.rglob("*label*/*.nii.gz"))
    labels[0].unlink()
    labels[1].write_bytes(b"")
    with pytest.raises(DataError) as refused:
        suggest(root, "mine", tmp_path / "mine.yaml", gpu_gib=0)
    assert len(refused.value.faults) == 2

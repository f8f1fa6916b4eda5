"""What `predict` is given and where it writes: layouts, endings, channel order, other devices' precisions."""

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from fasttrain import train
from fasttrain.data.sources import find_cases
from fasttrain.data.sources.unlabelled import channel_suffixes, channels_of_one_case, find_unlabelled, label_files
from fasttrain.delivery import evaluate, open_run, predict
from fasttrain.delivery.done_before import RECORD
from fasttrain.engine.run import RunResult
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.recipe.data_spec import DataSpec


def silent(done: int, total: int) -> None: ...


def spec(source: dict, channels: list[str]) -> DataSpec:
    return DataSpec.model_validate(
        {
            "source": source,
            "channels": channels,
            "classes": {1: "a"},
            "split": {"kind": "last", "validation": 1},
            "intensity": {"kind": "none"},
        }
    )


def values(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


@pytest.fixture
def image(phantoms: Path) -> Path:
    return sorted((phantoms / "imagesTr").iterdir())[0]


def test_uncompressed_files_go_in_and_out(whole_run: RunResult, image: Path, tmp_path: Path) -> None:
    nib.save(nib.load(image), tmp_path / "plain.nii")
    run = open_run(whole_run.run, "cpu")
    packed = predict(run, image, tmp_path / "packed.nii.gz", silent, StopRequest())
    plain = predict(run, tmp_path / "plain.nii", tmp_path / "out/plain.nii", silent, StopRequest())
    folder = predict(run, tmp_path / "plain.nii", tmp_path / "folder", silent, StopRequest())
    assert (plain.faults, packed.faults, folder.faults) == ((), (), ())
    assert plain.written == (tmp_path / "out/plain.nii",)
    assert folder.written == (tmp_path / "folder/plain.nii.gz",)
    assert plain.written[0].is_file()
    assert plain.written[0].read_bytes()[:2] != b"\x1f\x8b"
    for path in (*plain.written, *folder.written):
        assert np.array_equal(values(path), values(packed.written[0]))


def test_an_odd_affine_comes_back_as_it_was(whole_run: RunResult, image: Path, tmp_path: Path) -> None:
    """Axes permuted and flipped in the file: the prediction lies in the file's own axes, and says the same in the world."""
    original = nib.load(image)
    turned = original.as_reoriented(np.array([[1, -1], [2, 1], [0, -1]]))
    nib.save(turned, tmp_path / "turned.nii.gz")
    run = open_run(whole_run.run, "cpu")
    straight = predict(run, image, tmp_path / "a.nii.gz", silent, StopRequest()).written[0]
    other = predict(run, tmp_path / "turned.nii.gz", tmp_path / "b.nii.gz", silent, StopRequest()).written[0]
    made = nib.load(other)
    assert made.shape == turned.shape
    assert np.allclose(made.affine, turned.affine, atol=1e-5)
    back = nib.load(straight).as_reoriented(np.array([[1, -1], [2, 1], [0, -1]]))
    assert (np.asarray(back.dataobj) == np.asarray(made.dataobj)).mean() > 0.999


def test_one_file_for_several_cases_is_refused(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is one file, and .* holds 6 cases; name a folder"):
        predict(open_run(whole_run.run, "cpu"), phantoms / "imagesTr", tmp_path / "one.nii.gz", silent, StopRequest())
    assert not (tmp_path / "one.nii.gz").exists()


def test_progress_counts_faulty_files_too(whole_run: RunResult, image: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    shutil.copy(image, tmp_path / "in/good.nii.gz")
    for name in ("bad_a", "bad_b"):
        (tmp_path / f"in/{name}.nii.gz").write_bytes(b"no volume")
    told: list[tuple[int, int]] = []
    done = predict(
        open_run(whole_run.run, "cpu"),
        tmp_path / "in",
        tmp_path / "out",
        lambda now, total: told.append((now, total)),
        StopRequest(),
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [path.name for path in done.written] == ["good.nii.gz"]
    assert len(done.faults) == 2
    assert all(name in " ".join(done.faults) for name in ("bad_a", "bad_b"))
    assert [path.name for path in (tmp_path / "out").glob("*.nii.gz")] == ["good.nii.gz"]


def test_a_file_beside_the_input_is_never_overwritten(tiny, phantoms: Path, tmp_path: Path) -> None:
    """Images CASE_img and labels CASE in one folder: a prediction there would take the label's place."""
    data = tmp_path / "data"
    data.mkdir()
    for path in (phantoms / "imagesTr").iterdir():
        shutil.copy(path, data / path.name.replace(".nii", "_img.nii"))
        shutil.copy(phantoms / "labelsTr" / path.name, data / path.name)
    source = {"kind": "folders", "images": ".", "labels": ".", "image_suffixes": ["_img"]}
    result = train(tiny(data__source=source, training__epochs=1), data=data, run=tmp_path / "run", device="cpu")
    run = open_run(result.run, "cpu")
    before = {path: path.read_bytes() for path in data.iterdir()}
    done = predict(run, data, data, silent, StopRequest())
    assert done.written == ()
    assert len(done.faults) == 6
    assert all("overwrite a file beside its input" in fault for fault in done.faults)
    assert {path: path.read_bytes() for path in data.iterdir()} == before
    elsewhere = predict(run, data, tmp_path / "out", silent, StopRequest())
    assert len(elsewhere.written) == 6
    assert not elsewhere.faults
    (tmp_path / "out" / RECORD).unlink()
    with pytest.raises(RecipeError, match="6 of 6 predictions are there already, such as .*--overwrite"):
        predict(run, data, tmp_path / "out", silent, StopRequest())
    again = predict(run, data, tmp_path / "out", silent, StopRequest(), overwrite=True)
    assert again.written == elsewhere.written


def two_channels(root: Path, phantoms: Path) -> None:
    """An nnU-Net folder whose dataset.json numbers the channels otherwise than the recipe names them."""
    for part in ("imagesTr", "labelsTr"):
        (root / part).mkdir(parents=True)
    for path in sorted((phantoms / "imagesTr").iterdir())[:4]:
        name, image = path.name.removesuffix(".nii.gz"), nib.load(path)
        shutil.copy(path, root / f"imagesTr/{name}_0001.nii.gz")
        noise = np.random.default_rng(0).normal(0, 100, image.shape).astype(np.float32)
        nib.save(nib.Nifti1Image(noise, image.affine), root / f"imagesTr/{name}_0000.nii.gz")
        shutil.copy(phantoms / "labelsTr" / path.name, root / "labelsTr")
    document = {
        "channel_names": {"0": "noise", "1": "CT"},
        "labels": {"background": 0, "liver": 1, "kidney": 2},
        "numTraining": 4,
        "file_ending": ".nii.gz",
    }
    (root / "dataset.json").write_text(json.dumps(document))


def test_channels_are_predicted_in_the_order_they_were_trained_in(tiny, phantoms: Path, tmp_path: Path) -> None:
    """The files to predict have no dataset.json beside them: the order is the run's own, not the recipe's."""
    root = tmp_path / "data"
    two_channels(root, phantoms)
    recipe = tiny(
        data__source={"kind": "nnunet"},
        data__channels=["CT", "noise"],
        data__split={"kind": "last", "validation": 1},
        training__epochs=3,
    )
    result = train(recipe, data=root, run=tmp_path / "run", device="cpu")
    run = open_run(result.run, "cpu")
    (case,) = result.summary["cases"]
    (tmp_path / "in").mkdir()
    for number in ("0000", "0001"):
        shutil.copy(root / f"imagesTr/{case}_{number}.nii.gz", tmp_path / "in")
    done = predict(run, tmp_path / "in", tmp_path / "out", silent, StopRequest())
    assert done.faults == ()
    made, label = values(done.written[0]), values(root / f"labelsTr/{case}.nii.gz")
    scores = evaluate(run, "validation", None, silent, StopRequest()).cases[0].classes
    for value, score in zip((1, 2), scores, strict=True):
        both = (made == value).sum() + (label == value).sum()
        assert score.dice == pytest.approx(2 * ((made == value) & (label == value)).sum() / both, abs=1e-9)
    assert max(score.dice or 0.0 for score in scores) > 0.05
    one = predict(run, tmp_path / f"in/{case}_0000.nii.gz", tmp_path / "one.nii.gz", silent, StopRequest())
    assert np.array_equal(values(one.written[0]), made)


def test_what_the_data_set_decided_is_told_by_a_case_of_it(tmp_path: Path, phantoms: Path) -> None:
    two_channels(tmp_path / "data", phantoms)
    for channels, suffixes in ((["CT", "noise"], ["_0001", "_0000"]), (["CT"], ["_0001"]), (["MR"], ["_0000"])):
        data = spec({"kind": "nnunet"}, channels)
        cases = find_cases(data.model_copy(update={"classes": {1: "liver", 2: "kidney"}}), tmp_path / "data").cases
        assert channel_suffixes(data, cases[0]) == suffixes
    assert channel_suffixes(spec({"kind": "folders"}, ["CT"]), cases[0]) is None


def test_a_run_trained_in_a_precision_this_device_lacks_still_predicts(
    whole_run: RunResult, image: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole_run.run, tmp_path / "run")
    recipe = tmp_path / "run/recipe.yaml"
    text = recipe.read_text()
    assert "amp: off" in text or "amp: 'off'" in text
    recipe.write_text(text.replace("amp: 'off'", "amp: fp16").replace("amp: off", "amp: fp16"))
    run = open_run(tmp_path / "run", "cpu")
    assert any("fp16" in warning and "float32" in warning for warning in run.warnings)
    made, usual = (
        predict(one, image, tmp_path / f"{name}.nii.gz", silent, StopRequest()).written[0]
        for name, one in (("a", run), ("b", open_run(whole_run.run, "cpu")))
    )
    assert np.array_equal(values(made), values(usual))


def test_the_best_checkpoint_answers_and_the_newest_sound_one_where_it_is_damaged(
    whole_run: RunResult, tmp_path: Path
) -> None:
    shutil.copytree(whole_run.run, tmp_path / "run")
    best = tmp_path / "run/checkpoints/best.pt"
    assert open_run(tmp_path / "run", "cpu").checkpoint == best
    best.write_bytes(best.read_bytes()[:-100])
    run = open_run(tmp_path / "run", "cpu")
    assert run.checkpoint.name == "last.pt"
    assert run.epoch == 4
    assert any("best.pt is damaged" in warning for warning in run.warnings)
    (tmp_path / "run/checkpoints/last.pt").write_bytes(b"")
    with pytest.raises(StorageError, match="damaged"):
        open_run(tmp_path / "run", "cpu")


def test_data_that_moved_are_scored_where_they_are_now(whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    shutil.copytree(phantoms, tmp_path / "moved")
    run = open_run(whole_run.run, "cpu")
    told: list[tuple[int, int]] = []
    scores = evaluate(
        run, "validation", tmp_path / "moved", lambda done, total: told.append((done, total)), StopRequest()
    )
    assert scores.summary.dice == whole_run.summary["best"]["value"]
    assert told == [(1, 2), (2, 2)]
    assert sorted(score.name for score in scores.cases) == sorted(whole_run.summary["cases"])


# ---- find_unlabelled


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


PLAIN = {"kind": "decathlon"}


def test_a_folder_gives_its_volumes_in_order_and_nothing_else(tmp_path: Path) -> None:
    touch(tmp_path, "b.nii", "a.nii.gz", "C.NII.GZ", "._a.nii.gz", ".hidden.nii", "notes.txt", "d.nrrd")
    (tmp_path / "sub.nii.gz").mkdir()
    cases = find_unlabelled(spec(PLAIN, ["CT"]), tmp_path)
    assert [case.name for case in cases] == ["C", "a", "b"]
    assert all(case.label is None and len(case.images) == 1 for case in cases)


def test_one_file_is_one_case_whatever_lies_beside_it(tmp_path: Path) -> None:
    touch(tmp_path, "a.nii", "a.nii.gz", "b.nii.gz")
    for name in ("a.nii", "a.nii.gz"):
        (case,) = find_unlabelled(spec(PLAIN, ["CT"]), tmp_path / name)
        assert case.images == (tmp_path / name,)
        assert case.name == "a"


def test_a_case_that_is_there_twice_is_refused_with_both_files(tmp_path: Path) -> None:
    touch(tmp_path, "a.nii", "a.nii.gz", "b.nii.gz")
    with pytest.raises(DataError, match=r"case a has two files where one is expected: .*a\.nii, .*a\.nii\.gz"):
        find_unlabelled(spec(PLAIN, ["CT"]), tmp_path)


def test_a_file_that_is_no_volume_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.nrrd")
    with pytest.raises(DataError, match=r"a\.nrrd is no NIfTI file"):
        find_unlabelled(spec(PLAIN, ["CT"]), tmp_path / "a.nrrd")
    with pytest.raises(DataError, match=r"holds no volume to predict: looked for CASE\.nii\.gz, found 1 \.nrrd file"):
        find_unlabelled(spec(PLAIN, ["CT"]), tmp_path)
    with pytest.raises(DataError, match="does not exist; name a NIfTI file or a folder"):
        find_unlabelled(spec(PLAIN, ["CT"]), tmp_path / "nothing.nii.gz")


def test_every_case_that_lacks_a_channel_is_told_in_one_pass(tmp_path: Path) -> None:
    touch(tmp_path, "a_0000.nii.gz", "b_0001.nii.gz", "c_0000.nii.gz", "c_0001.nii.gz")
    with pytest.raises(DataError) as caught:
        find_unlabelled(spec({"kind": "nnunet"}, ["flair", "t1"]), tmp_path)
    assert len(caught.value.faults) == 2
    assert "case a lacks the image file of channel t1" in caught.value.faults
    assert "case b lacks the image file of channel flair" in caught.value.faults


def test_a_file_of_no_channel_is_told_what_its_name_should_end_in(tmp_path: Path) -> None:
    touch(tmp_path, "scan.nii.gz", "a_0000.nii.gz", "a_0001.nii.gz")
    with pytest.raises(DataError, match=r"scan\.nii\.gz is no file of one channel: .* end in _0000, _0001"):
        find_unlabelled(spec({"kind": "nnunet"}, ["flair", "t1"]), tmp_path / "scan.nii.gz")
    (case,) = find_unlabelled(spec({"kind": "nnunet"}, ["flair", "t1"]), tmp_path / "a_0001.nii.gz")
    assert [path.name for path in case.images] == ["a_0000.nii.gz", "a_0001.nii.gz"]


def test_a_lone_file_of_a_single_channel_layout_needs_no_number(tmp_path: Path) -> None:
    touch(tmp_path, "scan.nii.gz", "a_0000.nii.gz")
    single = spec({"kind": "nnunet"}, ["CT"])
    assert [case.name for case in find_unlabelled(single, tmp_path / "scan.nii.gz")] == ["scan"]
    assert [case.name for case in find_unlabelled(single, tmp_path / "a_0000.nii.gz")] == ["a"]


def test_folders_with_suffixes_are_read_by_them(tmp_path: Path) -> None:
    touch(tmp_path, "a-ct.nii.gz", "a-pet.nii.gz", "a-seg.nii.gz")
    both = spec({"kind": "folders", "image_suffixes": ["-pet", "-ct"], "label_suffix": "-seg"}, ["PET", "CT"])
    (case,) = find_unlabelled(both, tmp_path)
    assert [path.name for path in case.images] == ["a-pet.nii.gz", "a-ct.nii.gz"]


def names_of(paths: tuple[Path, ...]) -> list[str]:
    return [path.name for path in paths]


@pytest.mark.parametrize("where", [{"images": ".", "labels": "."}, {"images": "images", "labels": "labels"}])
def test_label_maps_beside_the_images_are_no_images(tmp_path: Path, where: dict[str, str]) -> None:
    touch(tmp_path, "a.nii.gz", "a_organs.nii.gz", "b.nii.gz", "b_organs.nii", "organs.nii.gz")
    one = spec({"kind": "folders", "label_suffix": "_organs", **where}, ["CT"])
    assert [case.name for case in find_unlabelled(one, tmp_path)] == ["a", "b", "organs"]
    assert names_of(label_files(one, tmp_path)) == ["a_organs.nii.gz", "b_organs.nii"]
    (named,) = find_unlabelled(one, tmp_path / "a_organs.nii.gz")
    assert named.name == "a_organs"
    assert label_files(one, tmp_path / "a_organs.nii.gz") == ()


def test_an_image_without_a_partner_is_a_label_only_where_both_shared_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "a_late.nii.gz", "b_late.nii.gz")
    apart = spec({"kind": "folders", "label_suffix": "_late"}, ["CT"])
    assert [case.name for case in find_unlabelled(apart, tmp_path)] == ["a_late", "b_late"]
    assert label_files(apart, tmp_path) == ()
    shared = spec({"kind": "folders", "images": ".", "labels": ".", "label_suffix": "_late"}, ["CT"])
    with pytest.raises(DataError, match=r"no volume to predict.*which all end as the run's labels do \(_late\)"):
        find_unlabelled(shared, tmp_path)


def test_a_longer_image_suffix_goes_before_the_labels(tmp_path: Path) -> None:
    touch(tmp_path, "a_t1_seg.nii.gz", "a_seg.nii.gz", "a_t2.nii.gz")
    source = {
        "kind": "folders",
        "images": ".",
        "labels": ".",
        "image_suffixes": ["_t1_seg", "_t2"],
        "label_suffix": "_seg",
    }
    both = spec(source, ["T1", "T2"])
    (case,) = find_unlabelled(both, tmp_path)
    assert names_of(case.images) == ["a_t1_seg.nii.gz", "a_t2.nii.gz"]
    assert names_of(label_files(both, tmp_path)) == ["a_seg.nii.gz"]
    assert label_files(spec(PLAIN, ["CT"]), tmp_path) == ()


def test_files_numbered_as_channels_are_told_from_files_numbered_as_cases(tmp_path: Path) -> None:
    def groups(*names: str) -> list[tuple[str, ...]]:
        folder = tmp_path / "-".join(names)[:60]
        touch(folder, *(f"{name}.nii.gz" for name in names))
        return list(channels_of_one_case(find_unlabelled(spec(PLAIN, ["CT"]), folder)))

    assert groups("a_0000", "a_0001", "b_0000", "b_0001", "c") == [("a_0000", "a_0001"), ("b_0000", "b_0001")]
    assert groups("img_0001", "img_0002") == []
    assert groups("a_0000", "b_0000") == []
    assert groups("a_0000", "a_0002") == []
    assert groups(*(f"c_{number:04d}" for number in range(20))) == []


def test_what_the_names_leave_in_doubt_is_told_once(whole_run: RunResult, image: Path, tmp_path: Path) -> None:
    for number in ("0000", "0001"):
        (tmp_path / "in").mkdir(exist_ok=True)
        shutil.copy(image, tmp_path / f"in/a_{number}.nii.gz")
    said: list[str] = []
    predict(open_run(whole_run.run, "cpu"), tmp_path / "in", tmp_path / "out", silent, StopRequest(), warn=said.append)
    assert said == [
        "a_0000 and a_0001 look like channels of one case, but the run has one channel, so that each file is predicted as a case "
        "of its own"
    ]
    said.clear()
    predict(open_run(whole_run.run, "cpu"), image, tmp_path / "out", silent, StopRequest(), warn=said.append)
    assert said == []


def test_a_run_on_images_and_labels_in_one_folder_predicts_the_images_of_it(
    tiny, phantoms: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in (phantoms / "imagesTr").iterdir():
        shutil.copy(path, data)
        shutil.copy(phantoms / "labelsTr" / path.name, data / path.name.replace(".nii", "_organs.nii"))
    source = {"kind": "folders", "images": ".", "labels": ".", "label_suffix": "_organs"}
    result = train(tiny(data__source=source, training__epochs=1), data=data, run=tmp_path / "run", device="cpu")
    said: list[str] = []
    done = predict(open_run(result.run, "cpu"), data, tmp_path / "out", silent, StopRequest(), warn=said.append)
    assert done.faults == done.passed_over == ()
    assert sorted(path.name for path in done.written) == sorted(path.name for path in (phantoms / "imagesTr").iterdir())
    assert len(done.labels) == 6
    (sentence,) = said
    assert sentence.startswith("6 files end in _organs as the run's labels do, and were not predicted (")

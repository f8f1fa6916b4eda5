"""DICOM series as volumes: values, places, order, and every series that is no volume refused with what was found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_builders import make_recipe, save
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

pydicom = pytest.importorskip("pydicom", reason="the extra dicom is not installed")
from dicom_builders import (  # noqa: E402
    AXIAL,
    CORONAL,
    OBLIQUE,
    ORIGIN,
    change_file,
    compress,
    uid_of,
    write_series,
)
from pydicom.data import get_testdata_file  # noqa: E402
from pydicom.uid import JPEG2000Lossless, RLELossless  # noqa: E402

from fasttrain.data.dicom.pixels import decoded  # noqa: E402
from fasttrain.data.dicom.slices import Slice  # noqa: E402
from fasttrain.data.dicom.stack import _stacked  # noqa: E402
from fasttrain.data.reading import read_image  # noqa: E402
from fasttrain.data.sources import find_cases, look_for_cases  # noqa: E402
from fasttrain.data.sources.unlabelled import find_unlabelled  # noqa: E402
from fasttrain.data.volume_files import read_file, read_header  # noqa: E402
from fasttrain.errors import DataError, MachineError  # noqa: E402
from fasttrain.samples import Case  # noqa: E402

STORED = np.random.default_rng(0).integers(0, 3000, (7, 12, 10)).astype(np.uint16)


def spec(**source: object):
    return make_recipe(source={"kind": "dicom", **source}).data


def image_of(path: Path):
    return read_image(Case("p1", (path,), None), spec(), 3)


def faults_of(path: Path) -> tuple[str, ...]:
    """What the header alone shows is what reading shows."""
    with pytest.raises(DataError) as by_header:
        read_header(path)
    with pytest.raises(DataError) as whole:
        read_file(path)
    assert by_header.value.faults == whole.value.faults
    return whole.value.faults


# --- values and places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [AXIAL, CORONAL, OBLIQUE], ids=["axial", "coronal", "oblique"])
def test_a_voxel_has_its_hounsfield_value_at_its_place_in_the_patient(tmp_path: Path, orientation) -> None:
    paths = write_series(tmp_path / "p1", STORED, orientation=orientation, slope=2.0, intercept=-1000.0)
    image, grid = image_of(paths[3])
    assert image.shape == (1, 10, 12, 7)
    np.testing.assert_array_equal(image[0].transpose(2, 1, 0), STORED * 2.0 - 1000.0)
    column, row, place = 4, 9, 5
    along_row, along_column = np.array(orientation[:3]), np.array(orientation[3:])
    # By the equation of the standard (C.7.6.2.1-1), in LPS
    patient = (
        ORIGIN + np.cross(along_row, along_column) * 3.0 * place + along_row * 0.5 * column + along_column * 0.75 * row
    )
    found = grid.affine @ [column, row, place, 1]
    np.testing.assert_allclose(found[:3], patient * (-1, -1, 1), atol=1e-6)


def test_signed_values_and_slices_that_run_against_their_files(tmp_path: Path) -> None:
    stored = STORED.astype(np.int16) - 1500
    paths = write_series(tmp_path / "p1", stored, step=-2.0, intercept=0.0)
    image, grid = image_of(paths[0])
    # Position along the normal rises, whatever the numbers of the instances and the names say
    np.testing.assert_array_equal(image[0].transpose(2, 1, 0), stored[::-1])
    assert grid.affine[2, 2] == pytest.approx(2.0)
    assert grid.affine[2, 3] == pytest.approx(ORIGIN[2] - 12.0)


def test_each_slice_is_scaled_by_its_own_slope_and_intercept(tmp_path: Path) -> None:
    slopes, intercepts = [1.0 + place / 4 for place in range(7)], [-float(place) for place in range(7)]
    paths = write_series(tmp_path / "p1", STORED, slope=slopes, intercept=intercepts)
    image, _ = image_of(paths[0])
    wanted = STORED * np.array(slopes)[:, None, None] + np.array(intercepts)[:, None, None]
    np.testing.assert_array_equal(image[0].transpose(2, 1, 0), wanted.astype(np.float32))


def test_a_series_without_slope_keeps_its_values(tmp_path: Path) -> None:
    def without(place: int, dataset) -> None:
        del dataset.RescaleSlope, dataset.RescaleIntercept

    paths = write_series(tmp_path / "p1", STORED, change=without)
    np.testing.assert_array_equal(image_of(paths[0])[0][0].transpose(2, 1, 0), STORED)


def test_one_slice_is_a_volume_of_its_thickness(tmp_path: Path) -> None:
    (path,) = write_series(tmp_path / "p1", STORED[:1], step=4.0)
    header = read_header(path)
    assert header.shape == (10, 12, 1)
    assert header.affine[2, 2] == pytest.approx(4.0)


def test_positions_may_be_rounded_by_a_tenth_of_a_slice_and_no_more(tmp_path: Path) -> None:
    def by(shift: float) -> Callable:
        def change(place: int, dataset) -> None:
            if place == 3:
                x, y, z = map(float, dataset.ImagePositionPatient)
                dataset.ImagePositionPatient = [x, y, z + shift]

        return change

    paths = write_series(tmp_path / "p1", STORED, change=by(0.25))
    assert read_header(paths[0]).affine[2, 2] == pytest.approx(3.0)
    paths = write_series(tmp_path / "p2", STORED, change=by(0.9))
    (fault,) = faults_of(paths[0])
    assert "the gaps are uneven, 3.9 mm between" in fault


def test_a_multi_frame_file_is_a_volume_of_its_frames(tmp_path: Path) -> None:
    (path,) = write_series(tmp_path / "p1", STORED[:1])
    dataset = pydicom.dcmread(path)
    groups = []
    for place in (2, 0, 1):
        group, position, scaling = (pydicom.Dataset() for _ in range(3))
        position.ImagePositionPatient = [0, 0, 2.0 * place]
        scaling.RescaleSlope, scaling.RescaleIntercept = 1.0, -1024.0
        group.PlanePositionSequence, group.PixelValueTransformationSequence = [position], [scaling]
        groups.append(group)
    shared, direction, measures = (pydicom.Dataset() for _ in range(3))
    direction.ImageOrientationPatient, measures.PixelSpacing = list(AXIAL), [0.75, 0.5]
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = [direction], [measures]
    dataset.PerFrameFunctionalGroupsSequence, dataset.SharedFunctionalGroupsSequence = groups, [shared]
    dataset.NumberOfFrames, dataset.PixelData = 3, STORED[:3].tobytes()
    del dataset.ImagePositionPatient, dataset.ImageOrientationPatient, dataset.PixelSpacing
    dataset.save_as(path)
    image, grid = image_of(path)
    np.testing.assert_array_equal(image[0].transpose(2, 1, 0), STORED[[1, 2, 0]].astype(np.float32) - 1024)
    np.testing.assert_allclose(np.diag(grid.affine), [-0.5, -0.75, 2.0, 1.0])


def test_compressed_slices_hold_the_voxels_of_plain_ones(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    plain, _ = image_of(paths[0])
    for path in paths[1:]:
        compress(path, RLELossless)
    np.testing.assert_array_equal(image_of(paths[0])[0], plain)


@pytest.mark.parametrize("name", ["MR_small_jp2klossless.dcm", "MR_small_jpeg_ls_lossless.dcm", "MR_small_RLE.dcm"])
def test_each_compression_gives_the_pixels_of_the_plain_file(name: str) -> None:
    """Files of pydicom's own: one slice written plainly and by other programs' encoders."""
    files = [get_testdata_file(one, download=False) for one in (name, "MR_small.dcm")]
    if None in files:
        pytest.skip("this pydicom brings no such file")
    np.testing.assert_array_equal(decoded(Path(files[0])), decoded(Path(files[1])))


def test_a_compression_that_nothing_decodes_is_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    path = get_testdata_file("MR_small_jp2klossless.dcm", download=False)
    if path is None:
        pytest.skip("this pydicom brings no such file")
    monkeypatch.setattr(pydicom.pixels.get_decoder(JPEG2000Lossless), "_available", {})
    with pytest.raises(
        MachineError, match=r"JPEG 2000 .* which no installed package decodes; install .*fasttrain\[dicom\]"
    ):
        decoded(Path(path))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_slices_in_any_order_and_direction_are_one_volume(data: st.DataObject) -> None:
    draw = data.draw
    turned = Rotation.from_euler("xyz", [draw(st.floats(-180, 180)) for _ in range(3)], degrees=True).as_matrix()
    spacing, step = (
        [draw(st.floats(0.2, 5.0)) for _ in range(2)],
        draw(st.floats(0.2, 9.0)) * draw(st.sampled_from([-1, 1])),
    )
    origin = np.array([draw(st.floats(-300, 300)) for _ in range(3)])
    count = draw(st.integers(2, 6))
    places = draw(st.permutations(range(count)))
    header = {"Rows": 4, "Columns": 5, "BitsAllocated": 16, "PixelRepresentation": 0}
    slices = [
        Slice(Path(f"{place}.dcm"), 0, origin + turned[:, 2] * step * place, np.concatenate([turned[:, 0], turned[:, 1]]),
              (spacing[0], spacing[1]), 1.0, 0.0, header)
        for place in places
    ]  # fmt: skip
    stack = _stacked("made", slices)
    ordered = sorted(range(count), reverse=step < 0)
    assert [one.path.stem for one in stack.slices] == [str(place) for place in ordered]
    for number, place in enumerate(ordered):
        patient = origin + turned[:, 2] * step * place + turned[:, 0] * spacing[1] * 4 + turned[:, 1] * spacing[0] * 3
        found = stack.affine @ [4, 3, number, 1]
        np.testing.assert_allclose(found[:3], patient * (-1, -1, 1), atol=1e-6)
    assert np.linalg.det(stack.affine[:3, :3]) > 0


def test_real_series_are_read_in_order(real_data: Callable[[str], Path]) -> None:
    root = real_data("dicom_mr")
    cases = find_unlabelled(spec(), root)
    assert [case.name for case in cases] == ["study1", "study2"]
    for case, shape, largest in zip(cases, ((35, 51, 32), (36, 48, 35)), (154, 5076), strict=True):
        image, grid = read_image(case, spec(), 3)
        assert image.shape == (1, *shape)
        assert (image.min() >= 0, image.max()) == (True, largest)
        np.testing.assert_array_equal(grid.affine, [[-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
        files = {int(path.stem): path for path in (root / case.name).glob("*.dcm")}
        for place in (0, shape[2] // 2, shape[2] - 1):
            # Named by the place of the slice, of which 10.dcm comes before 2.dcm
            np.testing.assert_array_equal(image[0, :, :, place].T, pydicom.dcmread(files[place + 1]).pixel_array)


def test_real_odd_files_are_a_slice_or_a_sentence(real_data: Callable[[str], Path]) -> None:
    root = real_data("odd")
    image, _ = image_of(root / "pydicom__CT_small.dcm")
    slice_ = pydicom.dcmread(root / "pydicom__CT_small.dcm")
    np.testing.assert_array_equal(
        image[0, :, :, 0].T, slice_.pixel_array.astype(np.float32) + float(slice_.RescaleIntercept)
    )
    for name, words in (
        ("pydicom__MR_truncated.dcm", "announces 8,192 bytes of pixels, but 8,130 are there"),
        ("pydicom__no_meta.dcm", "DICOM is not read here"),
        ("pydicom__rtdose.dcm", "frames without places"),
    ):
        with pytest.raises(DataError) as refused:
            image_of(root / name)
        (fault,) = refused.value.faults
        assert fault.startswith(str(root / name))
        assert words in fault


# --- what is no volume -------------------------------------------------------------------------------------------------


def test_mixed_orientations_are_counted(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    for path in paths[:2]:
        change_file(path, ImageOrientationPatient=list(CORONAL))
    (fault,) = faults_of(paths[0])
    assert (
        'series 3 "ct" (CT, 7 files) has slices of differing orientation: 5 of 1 0 0 0 1 0, 2 of 1 0 0 0 0 -1' in fault
    )


def test_differing_sizes_and_spacings_are_counted(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    change_file(paths[1], Rows=10, Columns=12)
    change_file(paths[2], PixelSpacing=[0.75, 0.6])
    sizes, spacings = faults_of(paths[0])
    assert "differing size (columns×rows): 6 of 10×12, 1 of 12×10" in sizes
    assert "differing PixelSpacing: 6 of 0.75 0.5, 1 of 0.75 0.6" in spacings


@pytest.mark.parametrize(("gone", "words"), [([3], "1 slice missing, 6 mm"), ([2, 3], "2 slices missing, 9 mm"),
                                             ([1, 4], "2 slices missing, 6 mm"), ([1], "1 slice missing, 6 mm"),
                                             ([5], "1 slice missing, 6 mm")])  # fmt: skip
def test_missing_slices_are_told_and_never_respaced(tmp_path: Path, gone: list[int], words: str) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    for place in gone:
        paths[place].unlink()
    (fault,) = faults_of(paths[0])
    assert words in fault
    assert "where 3 mm are usual" in fault
    assert (", and 1 more such gap" in fault) == (gone == [1, 4])


def test_two_slices_at_one_place_are_told_by_what_differs(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    shutil.copy(paths[2], tmp_path / "p1" / "copy.dcm")
    (fault,) = faults_of(paths[0])
    assert "two slices at one place, 1 time" in fault
    assert "one is a copy" in fault
    change_file(tmp_path / "p1" / "copy.dcm", EchoNumbers=2)
    (fault,) = faults_of(paths[0])
    assert "they differ in EchoNumbers, so these are several volumes in one series" in fault


def test_a_tilted_gantry_is_refused(tmp_path: Path) -> None:
    def tilt(place: int, dataset) -> None:
        x, y, z = map(float, dataset.ImagePositionPatient)
        dataset.ImagePositionPatient = [x, y + 0.5 * place, z]

    (fault,) = faults_of(write_series(tmp_path / "p1", STORED, change=tilt)[0])
    assert "up to 3 mm beside the line of their normal" in fault


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"ImagePositionPatient": None}, "has no ImagePositionPatient"),
        ({"ImageOrientationPatient": [1, 0, 0, 0.7, 0.7, 0]}, "two perpendicular directions"),
        ({"PixelSpacing": [0.0, 0.5]}, "distances above 0 are expected"),
        ({"RescaleSlope": 0}, "has RescaleSlope 0"),
        ({"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB"}, "holds RGB pixels"),
        ({"FrameOfReferenceUID": "1.2.3"}, "differing FrameOfReferenceUID"),
        ({"PixelRepresentation": 1}, "differing pixel type"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_slice_that_fits_in_nowhere_is_named(tmp_path: Path, attributes: dict, words: str) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    change_file(paths[4], **attributes)
    (fault,) = faults_of(paths[0])
    assert words in fault
    assert "differing" in fault or str(paths[4]) in fault


def test_truncated_and_damaged_pixels_are_all_named(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    compress(paths[5], RLELossless)
    whole = paths[5].read_bytes()
    paths[5].write_bytes(whole[:-60])
    with open(paths[1], "r+b") as stream:
        stream.truncate(paths[1].stat().st_size - 100)
    change_file(paths[2], PixelData=STORED[0, :6].tobytes())
    read_header(paths[0])
    with pytest.raises(DataError) as refused:
        read_file(paths[0])
    faults = refused.value.faults
    assert [next(path for path in paths if str(path) in fault) for fault in faults] == [paths[1], paths[2], paths[5]]
    assert "is cut short: its header announces 240 bytes of pixels, but 120 are there" in faults[1]
    assert "cut short before their end" in faults[2]
    assert all("\n" not in fault and "get the file anew" in fault for fault in faults)


# --- which series ------------------------------------------------------------------------------------------------------


def _labelled(root: Path, name: str, folder: Path | None = None, **more) -> list[Path]:
    paths = write_series(folder or root / name, STORED, patient=name, **more)
    affine = read_header(paths[0]).affine
    save(root / f"{name}.nii.gz", (STORED.transpose(2, 1, 0) > 2000).astype(np.uint8), affine)
    return paths


def test_two_series_in_one_folder_are_told_and_one_is_picked(tmp_path: Path) -> None:
    for name in ("p1", "p2"):
        _labelled(tmp_path, name, number=3, description="Portal  venous")
        # Written first and renamed, since both call their files alike
        other = write_series(
            tmp_path / "other", STORED[:, ::-1], f"other {name}", patient=name, number=4, description="Late"
        )
        for path in other:
            path.rename(tmp_path / name / f"b{path.name}")
    (tmp_path / "other").rmdir()
    with pytest.raises(DataError) as refused:
        find_cases(spec(), tmp_path)
    assert len(refused.value.faults) == 2
    fault = refused.value.faults[0]
    assert 'holds 2 series of images: series 3 "Portal venous" (CT, 7 files) ' in fault
    assert 'series 4 "Late" (CT, 7 files)' in fault
    assert "data.source.series" in fault
    for wanted, flipped in ((3, False), ("portal venous", False), (4, True), ("4", True), ("LATE", True)):
        case = find_cases(spec(series=wanted), tmp_path).cases[0]
        stored = STORED[:, ::-1] if flipped else STORED
        np.testing.assert_array_equal(read_image(case, spec(), 3)[0][0].transpose(2, 1, 0), stored - 1024.0)
    found = look_for_cases(spec(series=uid_of("other p2")), tmp_path)
    assert [case.name for case in found.cases] == ["p2"]
    assert "holds no series of images called" in found.faults["p1"][0]


def test_a_list_of_series_names_one_a_channel(tmp_path: Path) -> None:
    _labelled(tmp_path, "p1", tmp_path / "p1" / "first", number=3)
    write_series(tmp_path / "p1" / "second", STORED[::-1], "other", patient="p1", number=4)
    recipe = make_recipe(source={"kind": "dicom", "series": [4, 3]}, channels=["late", "early"])
    (case,) = find_cases(recipe.data, tmp_path).cases
    image, _ = read_image(case, recipe.data, 3)
    np.testing.assert_array_equal(image.transpose(0, 3, 2, 1), np.stack([STORED[::-1], STORED]) - 1024.0)
    with pytest.raises(DataError, match="names 1 series for 2 channels"):
        find_cases(make_recipe(source={"kind": "dicom", "series": 3}, channels=["a", "b"]).data, tmp_path)


def test_other_files_among_the_slices_are_refused_unless_they_are_to_be_ignored(tmp_path: Path) -> None:
    _labelled(tmp_path, "p1")
    _labelled(tmp_path, "p2", tmp_path / "p2" / "study" / "series")
    for name in ("LICENSE", ".DS_Store", "._IM0000.dcm"):
        (tmp_path / "p1" / name).write_text("nothing to do with it")
    (tmp_path / "p2" / "report.pdf").write_text("not among the slices")
    (tmp_path / "notes").mkdir()
    found = look_for_cases(spec(), tmp_path)
    assert [case.name for case in found.cases] == ["p1", "p2"]
    assert found.warnings == (f"{tmp_path}: 1 folder without DICOM not used (notes)",)
    (tmp_path / "p1" / "IM0099.dcm").write_bytes(b"")
    (tmp_path / "p1" / "list.txt").write_text("IM0000.dcm")
    (tmp_path / "p1" / "more.txt").write_text("IM0001.dcm")
    (tmp_path / "p1" / "IM0098.dcm").write_bytes((tmp_path / "p1" / "IM0000.dcm").read_bytes()[:200])
    shutil.copy(tmp_path / "p1" / "IM0001.dcm", tmp_path / "p1" / "IM0097.dcm")
    change_file(tmp_path / "p1" / "IM0097.dcm", PixelData=None)
    found = look_for_cases(spec(), tmp_path)
    assert [case.name for case in found.cases] == ["p2"]
    faults = found.faults["p1"]
    assert any(
        "1 file among the DICOM files, of which each is empty (0 bytes) (IM0099.dcm)" in fault for fault in faults
    )
    assert any(
        "2 files among the DICOM files, of which each is no DICOM file (without its preamble) (list.txt, more.txt)"
        in fault
        for fault in faults
    )
    assert any(
        "a damaged DICOM file (cut short before its pixels) (IM0097.dcm, IM0098.dcm)" in fault for fault in faults
    )
    ignoring = spec(ignore=["list.txt", "more.txt", "IM0099.dcm", "IM0098.dcm", "IM0097.dcm", "LICENSE"])
    assert [case.name for case in find_cases(ignoring, tmp_path).cases] == ["p1", "p2"]


def test_a_case_without_a_mask_and_a_set_without_cases(tmp_path: Path) -> None:
    _labelled(tmp_path, "p1")
    write_series(tmp_path / "p2", STORED, patient="p2")
    found = look_for_cases(spec(), tmp_path)
    (fault,) = found.faults["p2"]
    assert f"{tmp_path / 'p2'}: the case has no label; looked for a DICOM SEG or RTSTRUCT or NIfTI mask in it" in fault
    with pytest.raises(DataError) as refused:
        look_for_cases(spec(), tmp_path / "p1")
    assert "7 DICOM files lie there without a folder of their own" in refused.value.faults[0]


def test_predict_takes_a_file_a_series_or_a_folder_of_cases(tmp_path: Path) -> None:
    _labelled(tmp_path, "p1")
    paths = _labelled(tmp_path, "p2")
    for where, names in ((tmp_path, ["p1", "p2"]), (tmp_path / "p2", ["p2"]), (paths[3], ["p2"])):
        cases = find_unlabelled(spec(), where)
        assert [case.name for case in cases] == names
        np.testing.assert_array_equal(read_image(cases[-1], spec(), 3)[0][0].transpose(2, 1, 0), STORED - 1024.0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no volume to predict"):
        find_unlabelled(spec(), tmp_path / "empty")


def test_a_recipe_for_planes_on_a_series_says_that_it_is_a_volume(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    with pytest.raises(
        DataError, match="10×12×7, 7 channels, but .* or if it is a volume give patch.size three values"
    ):
        read_image(Case("p1", (paths[0],), None), spec(), 2)


def test_a_dicom_file_in_a_decathlon_list_is_no_image(tmp_path: Path) -> None:
    paths = _labelled(tmp_path, "p1")
    entry = f'{{"image": "{paths[0]}", "label": "p1.nii.gz"}}'
    (tmp_path / "dataset.json").write_text(f'{{"labels": {{"1": "liver", "2": "kidney"}}, "training": [{entry}]}}')
    with pytest.raises(DataError, match="DICOM is not read here; set data.source.kind: dicom"):
        find_cases(make_recipe().data, tmp_path)

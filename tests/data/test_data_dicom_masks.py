"""Masks that were drawn on DICOM series: SEG and RTSTRUCT voxel by voxel, names of structures, and masks that fit nothing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_builders import make_recipe, save
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("highdicom", reason="the extra dicom is not installed")
from dicom_builders import (
    AXIAL,
    CORONAL,
    OBLIQUE,
    change_file,
    in_patient,
    write_segmentation,
    write_series,
    write_structures,
)

from fasttrain.data.checking import check_cases
from fasttrain.data.checking.judging import Terms
from fasttrain.data.dicom.structure_set import _fill_slice
from fasttrain.data.finding import cases_for
from fasttrain.data.layouts import recognise
from fasttrain.data.reading import read_image, read_label
from fasttrain.data.sources import find_cases, look_for_cases
from fasttrain.data.volume_files import read_header
from fasttrain.errors import DataError

STORED = np.random.default_rng(0).integers(0, 3000, (7, 12, 10)).astype(np.uint16)
LIVER, KIDNEY = (np.zeros(STORED.shape, dtype=bool) for _ in range(2))
LIVER[1, 2:6, 3:9] = LIVER[2, 3:5, 4:6] = LIVER[5, 11, 9] = True
KIDNEY[4, 0:2, 0] = KIDNEY[2, 7:9, 1:4] = True


def spec(classes: dict | None = None, **source: object):
    return make_recipe(source={"kind": "dicom", **source}, **({"classes": classes} if classes else {})).data


def label_of(root: Path, data=None) -> np.ndarray:
    """[slice, row, column], as the slices were written."""
    data = data or spec()
    (case,) = find_cases(data, root).cases
    _, grid = read_image(case, data, 3)
    label, _ = read_label(case, data, 3, grid)
    return label[0].transpose(2, 1, 0)


def fault_of(root: Path, data=None) -> str:
    data = data or spec()
    with pytest.raises(DataError) as refused:
        label_of(root, data)
    (fault,) = refused.value.faults
    return fault


def box(low: tuple[float, float], high: tuple[float, float]) -> np.ndarray:
    """A contour around the rectangle [point, (column, row)]."""
    return np.array([low, (high[0], low[1]), high, (low[0], high[1])], dtype=np.float64)


# --- SEG ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [AXIAL, CORONAL, OBLIQUE], ids=["axial", "coronal", "oblique"])
def test_a_segmentation_lies_voxel_by_voxel_on_its_series(tmp_path: Path, orientation) -> None:
    paths = write_series(tmp_path / "p1", STORED, orientation=orientation)
    # Names are compared without regard to case; the order in the file is not that of the classes
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"Kidney": KIDNEY, "LIVER ": LIVER})
    np.testing.assert_array_equal(label_of(tmp_path), LIVER + 2 * KIDNEY)


def test_a_segmentation_drawn_from_the_other_end_lies_on_the_same_voxels(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    write_segmentation(tmp_path / "p1" / "masks" / "1.dcm", paths[::-1], {"liver": LIVER[::-1], "kidney": KIDNEY[::-1]})
    np.testing.assert_array_equal(label_of(tmp_path), LIVER + 2 * KIDNEY)


def test_a_segmentation_beside_the_voxels_of_the_image_is_refused(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    seg = write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": LIVER})
    import pydicom

    dataset = pydicom.dcmread(seg)
    for shift, words in ((0.03, None), (0.2, "lies 0.4 voxels beside those of"), (50.0, "outside")):
        moved = pydicom.dcmread(seg)
        for frame in moved.PerFrameFunctionalGroupsSequence:
            place = frame.PlanePositionSequence[0]
            place.ImagePositionPatient[0] = float(place.ImagePositionPatient[0]) + shift
        moved.save_as(seg)
        if words is None:
            np.testing.assert_array_equal(label_of(tmp_path), LIVER)
        else:
            assert words in fault_of(tmp_path)
        dataset.save_as(seg)


def test_a_segmentation_of_another_series_is_refused_with_both(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    other = write_series(tmp_path / "aside", STORED, "other")
    write_segmentation(tmp_path / "p1" / "seg.dcm", other, {"liver": LIVER})
    shutil.rmtree(tmp_path / "aside")
    with pytest.raises(DataError, match=r"seg.dcm was drawn on series .*, but the image is series"):
        find_cases(spec(), tmp_path)
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": LIVER})
    np.testing.assert_array_equal(label_of(tmp_path), LIVER)


def test_a_damaged_segmentation_is_one_sentence(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    seg = write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": LIVER})
    change_file(seg, PixelData=b"\0\0")
    assert f"{seg} cannot be read as a DICOM segmentation" in fault_of(tmp_path)


def test_a_segmentation_stored_as_a_label_map_is_the_same(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"Kidney": KIDNEY, "Liver": LIVER}, kind="LABELMAP")
    np.testing.assert_array_equal(label_of(tmp_path), LIVER + 2 * KIDNEY)


def test_fractional_segments_are_refused(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": LIVER}, kind="FRACTIONAL")
    assert "holds fractional segments" in fault_of(tmp_path)


# --- RTSTRUCT ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [AXIAL, CORONAL, OBLIQUE], ids=["axial", "coronal", "oblique"])
def test_contours_enclose_the_middles_of_their_voxels(tmp_path: Path, orientation) -> None:
    paths = write_series(tmp_path / "p1", STORED, orientation=orientation)
    at = lambda points, place: in_patient(points, place, orientation)  # noqa: E731
    liver = [
        at(box((1.6, 2.4), (6.4, 8.6)), 2),  # between middles: columns 2 to 6, rows 3 to 8
        at(box((3.0, 4.0), (5.0, 6.0)), 4),  # through middles, which count
        at(box((3.5, 4.5), (5.5, 6.5)), 2),  # a hole: columns 4 and 5, rows 5 and 6
        at(np.array([[0.0, 8.0], [4.0, 8.0], [0.0, 4.0]]), 5),  # a triangle, its edges and corners included
    ]
    structures = {"Liver": liver, "isocentre": [at(np.array([[5.0, 5.0]]), 3)], "kidney": [at(box((7, 1), (9, 3)), 2)]}
    write_structures(tmp_path / "p1" / "rs.dcm", paths, structures)
    wanted = np.zeros(STORED.shape, dtype=np.uint8)
    wanted[2, 3:9, 2:7] = 1
    wanted[2, 5:7, 4:6] = 0
    wanted[4, 4:7, 3:6] = 1
    for row in range(4, 9):
        wanted[5, row, : row - 3] = 1
    wanted[2, 1:4, 7:10] = 2
    np.testing.assert_array_equal(label_of(tmp_path), wanted)


def test_contours_between_the_slices_are_refused(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    inside, between = (in_patient(box((2, 2), (5, 5)), 2) for _ in range(2))
    between[:, 2] += 1.0
    write_structures(tmp_path / "p1" / "rs.dcm", paths, {"liver": [inside, between]})
    assert "has 1 of 2 contours of 'liver' between or across the slices of" in fault_of(tmp_path)


def test_contours_beyond_the_image_are_refused(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    write_structures(tmp_path / "p1" / "rs.dcm", paths, {"liver": [in_patient(box((7, 3), (11, 4)), 2)]})
    # Columns 10 and 11 of rows 3 and 4
    assert "has 4 voxels of 'liver' outside" in fault_of(tmp_path)


# --- names -------------------------------------------------------------------------------------------------------------


def test_structures_that_no_class_is_called_after_are_refused_mapped_or_left_out(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": LIVER, "Kidney_L": KIDNEY, "BODY": LIVER | KIDNEY})
    fault = fault_of(tmp_path)
    assert "holds structures of the name 'Kidney_L', 'BODY', but known are 'liver', 'kidney'" in fault
    assert "data.source.structures" in fault
    np.testing.assert_array_equal(label_of(tmp_path, spec(other_structures="skip")), LIVER)
    mapped = {"BODY": 0, "liver": 1, "kidney_l": 2}
    np.testing.assert_array_equal(label_of(tmp_path, spec(structures=mapped)), LIVER + 2 * KIDNEY)


def test_masks_of_which_everything_is_left_out_are_told_by_name(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name, called in (("p1", "Liver"), ("p2", "hepar"), ("p3", "hepar")):
        paths = write_series(root / name, STORED + len(name) * int(name[1]), name, patient=name)
        write_segmentation(root / name / "seg.dcm", paths, {called: LIVER, "BODY": KIDNEY}, name=f"seg {name}")

    def checked(**source: object):
        recipe = make_recipe(source={"kind": "dicom", **source}, classes={1: "liver"}, patch={"size": [4, 4, 4]})
        cases = find_cases(recipe.data, root).cases
        return check_cases(cases, root, Terms.of_recipe(recipe), None, tmp_path / "cache", 1)

    (told,) = (text for text in checked(other_structures="skip").warnings if "other_structures" in text)
    assert told.startswith("the masks of 2 cases (p2, p3) hold 'BODY', 'hepar' but no 'liver', and ")
    assert "data.source.structures" in told
    named = {"BODY": 0, "hepar": 1, "liver": 1}
    assert not [text for text in checked(structures=named).warnings if "other_structures" in text]
    shutil.rmtree(root / "p1")
    alone = checked(other_structures="skip")
    assert "nothing to learn" in alone.set_faults[0]
    assert alone.set_faults[1] == told


def test_structures_that_share_voxels_are_refused_unless_their_order_is_given(tmp_path: Path) -> None:
    both = LIVER & (np.arange(10) > 4)
    paths = write_series(tmp_path / "p1", STORED)
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"kidney": both, "liver": LIVER})
    assert f"has {both.sum()} voxels that belong to both 'liver' and 'kidney'" in fault_of(tmp_path)
    np.testing.assert_array_equal(label_of(tmp_path, spec(structures={"liver": 1, "kidney": 2})), LIVER + 1 * both)
    np.testing.assert_array_equal(label_of(tmp_path, spec(structures={"kidney": 2, "liver": 1})), LIVER)


def test_a_value_that_is_no_class_is_refused_as_in_any_label(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    write_segmentation(tmp_path / "p1" / "seg.dcm", paths, {"liver": LIVER})
    assert f"has the undeclared label value 7 in {LIVER.sum()} voxels" in fault_of(
        tmp_path, spec(structures={"liver": 7})
    )


# --- which mask --------------------------------------------------------------------------------------------------------


def test_of_several_masks_one_is_picked(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    affine = read_header(paths[0]).affine
    write_segmentation(tmp_path / "p1" / "a.dcm", paths, {"liver": LIVER}, "first reader")
    write_segmentation(tmp_path / "p1" / "b.dcm", paths, {"kidney": KIDNEY}, "second reader")
    write_structures(tmp_path / "p1" / "rs.dcm", paths, {"liver": [in_patient(box((2, 2), (5, 5)), 2)]})
    save(tmp_path / "p1.nii.gz", np.full((10, 12, 7), 2, dtype=np.uint8), affine)
    with pytest.raises(DataError, match="has 4 masks where one is expected"):
        find_cases(spec(), tmp_path)
    with pytest.raises(DataError, match="has 2 masks where one is expected"):
        find_cases(spec(labels="seg"), tmp_path)
    np.testing.assert_array_equal(label_of(tmp_path, spec(label_series="second reader")), 2 * KIDNEY)
    assert label_of(tmp_path, spec(labels="rtstruct")).sum() == 16
    assert (label_of(tmp_path, spec(labels="nifti")) == 2).all()
    with pytest.raises(DataError, match="has no label; looked for a DICOM SEG in a series called 'third'"):
        find_cases(spec(labels="seg", label_series="third"), tmp_path)


def test_a_nifti_mask_on_another_grid_is_refused(tmp_path: Path) -> None:
    paths = write_series(tmp_path / "p1", STORED)
    affine = read_header(paths[0]).affine.copy()
    affine[2, 3] += 1.5
    save(tmp_path / "p1" / "mask.nii.gz", np.ones((10, 12, 7), dtype=np.uint8), affine)
    assert "lies 1.5 mm (0.5 voxels) from" in fault_of(tmp_path)


def test_the_layout_is_recognised_with_the_names_of_the_structures(tmp_path: Path) -> None:
    for name in ("p1", "p2"):
        paths = write_series(tmp_path / name, STORED, patient=name)
        write_segmentation(tmp_path / name / "seg.dcm", paths, {"Left lung": LIVER, "heart": KIDNEY})
    layout = recognise(tmp_path)
    assert (layout.source.kind, layout.channels, layout.names) == ("dicom", ("CT",), {1: "Left lung", 2: "heart"})
    label, _ = read_label(layout.cases[0], layout.reading_spec("refuse"), 3, None)
    np.testing.assert_array_equal(label[0].transpose(2, 1, 0), LIVER + 2 * KIDNEY)
    with pytest.raises(DataError, match="data.source.kind=dicom"):
        cases_for(make_recipe().data, tmp_path)
    assert not look_for_cases(spec({1: "left LUNG", 2: "heart"}), tmp_path).faults


# --- geometry ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    corners=st.lists(st.tuples(st.integers(0, 36), st.integers(0, 44)), min_size=3, max_size=9, unique=True),
    nudge=st.sampled_from([0.0, 0.13]),
)
def test_a_filled_slice_is_that_of_a_slow_count_of_crossings(corners: list[tuple[int, int]], nudge: float) -> None:
    outline = np.array(corners, dtype=np.float64) / 4 + nudge
    piece = _fill_slice([outline], 3)
    assert piece.corner[2] == 3
    found = {(piece.corner[0] + column, piece.corner[1] + row) for column, row, _ in np.argwhere(piece.mask).tolist()}
    points = [(float(x), float(y)) for x, y in outline]
    edges = list(zip(points, points[1:] + points[:1], strict=True))
    expected = {
        (column, row)
        for column in range(-2, 14)
        for row in range(-2, 16)
        if _is_inside(float(column), float(row), edges)
    }
    assert found == expected


def _is_inside(x: float, y: float, edges: list) -> bool:
    crossings = 0
    for (x0, y0), (x1, y1) in edges:
        across = (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)
        # Contours are written with few digits: a thousandth of a voxel beside the line is on it
        near = abs(across) <= 1e-3 * math.hypot(x1 - x0, y1 - y0)
        if near and min(x0, x1) - 1e-3 <= x <= max(x0, x1) + 1e-3 and min(y0, y1) - 1e-3 <= y <= max(y0, y1) + 1e-3:
            return True
        if (y0 > y) != (y1 > y) and x < x0 + (y - y0) / (y1 - y0) * (x1 - x0):
            crossings += 1
    return crossings % 2 == 1

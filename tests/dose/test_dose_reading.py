"""OpenKBP's files: what they hold comes out of them, and what is wrong with one is told with its file and row."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dose_patients import INDEX, PLACE, PLACE_DOSE, write_patient
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.cli.main import run
from fasttrain.data.openkbp import GRID, STRUCTURES, VOXELS, csv_case, read_patient, write_compact
from fasttrain.data.openkbp_import import import_openkbp
from fasttrain.data.sources import find_cases
from fasttrain.data.sparse_csv import read_numbers, read_sparse, write_sparse
from fasttrain.errors import DataError, RecipeError
from fasttrain.recipe import resolve
from fasttrain.samples import Case


def text(path: Path, body: str) -> Path:
    path.write_bytes(body.encode())
    return path


def fault(path: Path, mask: bool = False) -> str:
    with pytest.raises(DataError) as caught:
        read_sparse(path, VOXELS, mask)
    return "\n".join(caught.value.faults)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 499),
        st.one_of(
            st.decimals(0, 20000, places=3).map(str),
            st.integers(-2000, 20000).map(str),
            st.floats(0, 1e30, allow_nan=False).map(repr),
            st.sampled_from(["1e-3", "2.5E2", "7.", ".5", "-0.25", "+3", " 4", "0.1234567890123456789"]),
        ),
        max_size=40,
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_values_are_those_that_python_reads(tmp_path_factory, rows: dict[int, str], newline: str, ends: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "values.csv"
    body = newline.join([",data", *(f"{index},{value}" for index, value in rows.items())])
    text(path, body + newline * ends)
    found = read_sparse(path, 500)
    assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == {
        index: float(value) for index, value in rows.items()
    }


def test_the_index_of_a_voxel(tmp_path: Path) -> None:
    volume = read_sparse(text(tmp_path / "dose.csv", f",data\n{INDEX},7.5\n"), VOXELS).dense(GRID)
    assert volume[PLACE] == 7.5
    assert np.count_nonzero(volume) == 1
    write_sparse(tmp_path / "back.csv", volume)
    assert (tmp_path / "back.csv").read_text() == f",data\n{INDEX},7.5\n"


def test_masks_of_no_row_one_row_and_any_order(tmp_path: Path) -> None:
    for body, wanted in ((",data\n", []), (",data", []), (",data\n7,\n", [7]), (",data\n9,\n2,1.0\n", [9, 2])):
        assert read_sparse(text(tmp_path / "mask.csv", body), VOXELS, mask=True).indices.tolist() == wanted


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("", "is empty (0 bytes)"),
        ("index,dose\n1,2\n", "row 1: the header is 'index,dose'"),
        (",data\n1,2\n2097152,3\n", "row 3 has the index 2097152, beyond the last voxel, 2097151"),
        (",data\n1,2\n99999999999999999999,3\n", "row 3 has the index 99999999999999999999, beyond"),
        (",data\n-1,2\n", "row 2 has the index '-1'; a whole number"),
        (",data\n4,1\n5,1\n4,2\n", "row 4 has the index 4, which an earlier row has too"),
        (",data\n1.5,2\n", "row 2 has the index '1.5'; a whole number"),
        (",data\n,2\n", "row 2 has the index ''; a whole number"),
        (",data\n1,2\n7\n", "row 3 is '7'; an index, a comma and a value"),
        (",data\n1,2,3\n", "row 2 is '1,2,3'"),
        (",data\n\n1,2\n", "row 2 is ''"),
        (",data\n1,nan\n", "row 2 has the value 'nan'; a finite number"),
        (",data\n1,\n", "row 2 has the value ''; a finite number"),
        (",data\n1,1_0\n", "row 2 has the value '1_0'; a finite number"),
        (
            ",data\n1,1e39\n",
            "row 2 has the value '1e39'; a finite number is expected (within ±3.4e38, as float32 has it)",
        ),
        (",data\n1,-1e300\n", "row 2 has the value '-1e300'; a finite number"),
        (",data\n1,2.3.4\n", "row 2 has the value '2.3.4'; a finite number"),
        (
            ",data\n1,x\n2,y\n3,z\n",
            "row 2 has the value 'x'; a finite number is expected (within ±3.4e38, as float32 has it) (and 2 more rows like it)",
        ),
    ],
)
def test_what_is_wrong_is_told_with_file_and_row(tmp_path: Path, body: str, told: str) -> None:
    path = text(tmp_path / "dose.csv", body)
    assert f"{path}" in fault(path)
    assert told in fault(path)


def test_every_kind_of_fault_of_a_file_in_one_pass(tmp_path: Path) -> None:
    path = text(tmp_path / "dose.csv", ",data\n1.5,2\n3,nan\n2097152,1\n4,1\n4,1\n")
    told = fault(path).splitlines()
    assert [re.search(r"row (\d)", one)[1] for one in told] == ["2", "4", "6", "3"]
    assert "a mask an index stands alone" in fault(text(tmp_path / "m.csv", ",data\n4,0.5\n"), mask=True)


def test_the_largest_values_of_float32_are_taken(tmp_path: Path) -> None:
    found = read_sparse(text(tmp_path / "dose.csv", ",data\n1,3.4e38\n2,-3.4028235e38\n"), VOXELS).dense(GRID)
    assert np.isfinite(found).all()
    assert found.min() == np.finfo(np.float32).min


@pytest.mark.parametrize("sides", ["0\n4\n2.5", "-4\n4\n2.5", "4\nnan\n2.5", "4\ninf\n2.5", "4\n4\n1e9", "4\n1e-9\n4", "4\n4",
                                   "4\n1_0\n4", "4\n٤\n4"])  # fmt: skip
def test_what_could_be_no_side_of_a_voxel_is_refused(tmp_path: Path, sides: str) -> None:
    with pytest.raises(
        DataError,
        match=r"voxel.csv holds .*3 positive numbers, one a row, are expected \(mm along each axis, from 0.01",
    ):
        read_numbers(text(tmp_path / "voxel.csv", sides), 3)
    assert read_numbers(text(tmp_path / "voxel.csv", "3.906\n3.906\n2.5\n"), 3) == (3.906, 3.906, 2.5)


def test_the_sides_in_a_compact_file_are_looked_at_too(tmp_path: Path) -> None:
    patient = read_patient(csv_case(write_patient(tmp_path / "pt_1")), STRUCTURES)
    path = tmp_path / "pt_1.npz"
    for sides in ((np.inf, 4.0, 2.5), (4.0, 1e9, 2.5), (4.0, np.nan, 2.5)):
        write_compact(path, replace(patient, spacing=sides))
        with pytest.raises(DataError, match="no compact patient: spacing"):
            read_patient(Case("pt_1", (path,), path), STRUCTURES)


def test_a_link_that_leads_nowhere_is_no_absent_structure(tmp_path: Path) -> None:
    folder = write_patient(tmp_path / "pt_1")
    (folder / "Larynx.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"Larynx\.csv cannot be read: No such file"):
        read_patient(csv_case(folder), STRUCTURES)
    (tmp_path / "gone.csv").write_text(",data\n7,\n")
    assert np.count_nonzero(read_patient(csv_case(folder), ("Larynx",)).structures & 1) == 1


def test_files_of_unknown_names_are_told(tmp_path: Path) -> None:
    data = resolve("openkbp").recipe.data
    for name in ("pt_1", "pt_2"):
        folder = write_patient(tmp_path / name)
        (folder / "Brainstem.csv").rename(folder / "BrainStem.csv")
    write_patient(tmp_path / "pt_3")
    (told,) = find_cases(data, tmp_path).warnings
    assert "pt_1/BrainStem.csv is no file of an OpenKBP patient; did you mean Brainstem.csv" in told
    assert told.endswith("it is not read (nor in 1 more patient)")
    for name in ("pt_1", "pt_2"):
        (tmp_path / name / "BrainStem.csv").unlink()
    assert find_cases(data, tmp_path).warnings == ()


@pytest.mark.parametrize("command", ["check", "train", "import"])
def test_a_dose_beyond_float32_is_exit_3_everywhere(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pt_1", "pt_2"):
        write_patient(tmp_path / "set" / name)
    dose = tmp_path / "set" / "pt_2" / "dose.csv"
    dose.write_text(dose.read_text() + "1,1e39\n")
    row = len(dose.read_text().splitlines())
    split = "data.split={kind: last, validation: 1}"
    words = {
        "check": ["check", "--recipe", "openkbp", "--data", str(tmp_path / "set"), "--set", split],
        "train": [
            "train",
            "--recipe",
            "openkbp",
            "--data",
            str(tmp_path / "set"),
            "--set",
            split,
            "--run",
            str(tmp_path / "run"),
            "--device",
            "cpu",
        ],
        "import": ["data", "import", "openkbp", str(tmp_path / "set"), str(tmp_path / "out")],
    }
    with pytest.raises(SystemExit) as ended:
        run(words[command])
    answer = capsys.readouterr()
    assert ended.value.code == 3
    assert f"dose.csv row {row:,} has the value '1e39'" in answer.err + answer.out


def test_a_patient_and_its_absent_structures(tmp_path: Path) -> None:
    folder = write_patient(tmp_path / "pt_1")
    (folder / "Larynx.csv").write_text(",data\n")
    patient = read_patient(csv_case(folder), STRUCTURES)
    assert patient.dose[PLACE] == np.float32(PLACE_DOSE)
    bits = [int(np.count_nonzero((patient.structures >> bit) & 1)) for bit in range(11)]
    assert bits == [360, 0, 360, 360, 0, 0, 0, 0, 0, 16**3, 38**3 + 1]
    assert patient.spacing == (4.0, 4.0, 2.5)
    fewer = read_patient(csv_case(folder), ("PTV70", "Brainstem"))
    assert [int(np.count_nonzero((fewer.structures >> bit) & 1)) for bit in range(3)] == [16**3, 360, 38**3 + 1]


def test_every_faulty_file_of_a_patient_is_told(tmp_path: Path) -> None:
    folder = write_patient(tmp_path / "pt_1")
    (folder / "ct.csv").write_bytes(b"")
    (folder / "PTV70.csv").write_text(",data\n1.5,\n")
    (folder / "voxel_dimensions.csv").write_text("4.0\n-4.0\n2.5\n")
    with pytest.raises(DataError) as caught:
        read_patient(csv_case(folder), STRUCTURES)
    assert [one.split(" ")[0].rsplit("/", 1)[-1] for one in caught.value.faults] == [
        "ct.csv",
        "PTV70.csv",
        "voxel_dimensions.csv",
    ]


def test_the_compact_form_loses_nothing(tmp_path: Path) -> None:
    folder = write_patient(tmp_path / "pt_1")
    patient = read_patient(csv_case(folder), STRUCTURES)
    path = tmp_path / "pt_1.npz"
    write_compact(path, patient)
    case = Case("pt_1", (path,), path)
    for names in (STRUCTURES, ("PTV70", "Brainstem")):
        back, wanted = read_patient(case, names), read_patient(csv_case(folder), names)
        for one, other in ((back.ct, wanted.ct), (back.dose, wanted.dose), (back.structures, wanted.structures)):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        assert back.spacing == wanted.spacing


def test_a_real_patient_in_both_forms(tmp_path: Path, real_patient: Path) -> None:
    patient = read_patient(csv_case(real_patient), STRUCTURES)
    assert patient.ct.max() == 19798
    path = tmp_path / "pt_6.npz"
    size = write_compact(path, patient)
    assert size < 0.2 * sum(one.stat().st_size for one in real_patient.iterdir())
    back = read_patient(Case("pt_6", (path,), path), STRUCTURES)
    assert np.array_equal(back.dose, patient.dose)
    assert np.array_equal(back.ct, patient.ct)
    assert np.array_equal(back.structures, patient.structures)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "pickle"])
def test_a_damaged_compact_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "pt_1.npz"
    write_compact(path, read_patient(csv_case(write_patient(tmp_path / "pt_1")), STRUCTURES))
    blob = bytearray(path.read_bytes())
    if damage == "cut":
        blob = blob[: len(blob) // 2]
    elif damage == "flipped":
        blob[len(blob) // 2] ^= 255
    elif damage == "empty":
        blob = bytearray()
    path.write_bytes(blob)
    if damage == "other":
        np.savez(path, ct=np.zeros((4, 4, 4)), structures=np.zeros((4, 4, 4)), spacing=np.ones(3), format=1)
    if damage == "pickle":
        np.savez(path, ct=np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"pt_1\.npz .*fasttrain data import openkbp"):
        read_patient(Case("pt_1", (path,), path), STRUCTURES)


def test_cases_are_found_in_their_parts_and_lacking_files_told(tmp_path: Path, patients: Path) -> None:
    data = resolve("openkbp").recipe.data
    assert [case.name for case in find_cases(data, patients).cases] == ["pt_1", "pt_2", "pt_201"]
    write_patient(tmp_path / "pt_7", dose=False)
    (tmp_path / "pt_7" / "ct.csv").unlink()
    with pytest.raises(DataError, match=r"pt_7: patient pt_7 lacks dose.csv, ct.csv"):
        find_cases(data, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no OpenKBP patient: looked for pt_1/ct.csv"):
        find_cases(data, tmp_path / "empty")
    write_patient(tmp_path / "twice" / "train-pats" / "pt_1")
    write_patient(tmp_path / "twice" / "test-pats" / "pt_1")
    with pytest.raises(DataError, match="patient pt_1 is there twice"):
        find_cases(data, tmp_path / "twice")


def test_import_and_what_it_keeps(tmp_path: Path, patients: Path) -> None:
    target = tmp_path / "compact"
    done = import_openkbp(patients, target)
    assert sorted(str(path.relative_to(target)) for path in done.written) == [
        "train-pats/pt_1.npz",
        "train-pats/pt_2.npz",
        "validation-pats/pt_201.npz",
    ]
    assert done.volume_bytes == 3 * 6 * VOXELS
    again = import_openkbp(patients, target)
    assert (len(again.written), len(again.kept)) == (0, 3)
    with pytest.raises(RecipeError, match="lies in"):
        import_openkbp(patients, patients / "compact")


def test_import_by_command_with_a_faulty_patient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_patient(tmp_path / "set" / "pt_1")
    write_patient(tmp_path / "set" / "pt_2")
    (tmp_path / "set" / "pt_2" / "dose.csv").write_text(",data\n3,1\n3,1\n")
    with pytest.raises(SystemExit) as ended:
        run(["data", "import", "openkbp", str(tmp_path / "set"), str(tmp_path / "out")])
    assert ended.value.code == 3
    assert "dose.csv row 3 has the index 3, which an earlier row has too" in capsys.readouterr().err
    assert (tmp_path / "out" / "pt_1.npz").exists()
    (tmp_path / "set" / "pt_2" / "dose.csv").write_text(",data\n3,1\n")
    with pytest.raises(SystemExit) as ended:
        run(["data", "import", "openkbp", str(tmp_path / "set"), str(tmp_path / "out"), "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["written"]) == len(document["kept"]) == 1


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789,.\n\r -e+x\x00", max_size=40), st.booleans())
def test_whatever_the_rows_are_they_are_read_as_python_would_or_refused(
    tmp_path_factory, body: str, mask: bool
) -> None:
    path = text(tmp_path_factory.getbasetemp() / "odd.csv", ",data\n" + body)
    rows = body.replace("\r", "").rstrip("\n").split("\n") if body.replace("\r", "").strip("\n") else []
    try:
        pairs = [row.split(",") for row in rows]
        wanted = {int(index): float(value or 1) if mask else float(value) for index, value in pairs}
        assert len(wanted) == len(rows)
        assert all(index.isdecimal() and int(index) < 500 and abs(wanted[int(index)]) < 3.4e38 for index, _ in pairs)
        assert not mask or all(value.strip() in ("", "1", "1.0") for _, value in pairs)
        assert all(value or mask for _, value in pairs)
    except (ValueError, AssertionError):
        with pytest.raises(DataError, match=r"odd\.csv row \d+"):
            read_sparse(path, 500, mask)
        return
    found = read_sparse(path, 500, mask)
    expected = dict.fromkeys(wanted, 1.0) if mask else wanted
    assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == expected

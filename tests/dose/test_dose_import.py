"""Importing OpenKBP where the set changes under way, holds something else than what was imported, or fills the disk."""

from __future__ import annotations

import os
import shlex
import textwrap
from pathlib import Path

import pytest
from dose_patients import write_patient
from small_machine import run_with

from fasttrain.data.layouts import recognise
from fasttrain.data.openkbp import STRUCTURES, read_patient
from fasttrain.data.openkbp_import import import_openkbp
from fasttrain.data.sources.openkbp import every_patient
from fasttrain.errors import DataError


def test_import_keeps_no_file_that_the_source_has_left_behind(tmp_path: Path) -> None:
    source, target = tmp_path / "set", tmp_path / "out"
    for name in ("pt_1", "pt_2"):
        write_patient(source / name)
    import_openkbp(source, target)
    before = os.stat(source / "pt_2" / "dose.csv")
    (source / "pt_2" / "dose.csv").write_text(",data\n3,1.5\n")
    os.utime(
        source / "pt_2" / "dose.csv", ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # an archive's times tell nothing
    with pytest.raises(DataError) as refused:
        import_openkbp(source, target)
    (fault,) = refused.value.faults
    assert "out/pt_2.npz is there already and is not what" in fault
    assert "--overwrite" in fault
    assert len(import_openkbp(source, target, overwrite=True).written) == 2
    (dose,) = (case for case in every_patient(target) if case.name == "pt_2")
    assert read_patient(dose, STRUCTURES).dose.sum() == 1.5
    (target / "pt_1.npz").write_bytes(b"PK no more")
    with pytest.raises(DataError, match=r"pt_1\.npz is damaged .* and --overwrite"):
        import_openkbp(source, target)


def test_import_of_a_set_that_is_still_being_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "set", tmp_path / "out"
    for name in ("pt_1", "pt_2", "pt_3"):
        write_patient(source / name)
    (source / "pt_1" / "PTV70.csv").rename(tmp_path / "late.csv")

    def copying(done: int, total: int, name: str) -> None:
        if name == "pt_2":
            (tmp_path / "late.csv").rename(source / "pt_1" / "PTV70.csv")
            with (source / "pt_2" / "ct.csv").open("a") as file:
                file.write("0,7\n")
            write_patient(source / "pt_4")

    with pytest.raises(DataError) as refused:
        import_openkbp(source, target, told=copying)
    first, second, third = refused.value.faults
    assert f"{source / 'pt_1'} changed while the set was imported" in first
    assert f"{source / 'pt_2'} changed" in second
    assert "got 1 more patient while it was imported (pt_4)" in third
    assert [path.name for path in sorted(target.iterdir())] == ["pt_3.npz"]
    again = import_openkbp(source, target)
    assert (len(again.written), len(again.kept)) == (3, 1)


def test_an_import_onto_a_full_disk_says_what_is_there(tmp_path: Path) -> None:
    for name in ("pt_1", "pt_2", "pt_3", "pt_4"):
        write_patient(tmp_path / "set" / name)
    import_openkbp(tmp_path / "set", tmp_path / "sizes")
    kib = (tmp_path / "sizes" / "pt_1.npz").stat().st_size * 5 // 2 // 1024
    (tmp_path / "small").mkdir()
    script = f"""
        import os, sys
        from fasttrain.cli.main import run
        try:
            run(["data", "import", "openkbp", {str(tmp_path / "set")!r}, {str(tmp_path / "small" / "out")!r}])
        finally:
            print(sorted(os.listdir({str(tmp_path / "small" / "out")!r})))
    """
    mounted = f"mount -t tmpfs -o size={kib}k tmpfs {shlex.quote(str(tmp_path / 'small'))} &&"
    done = run_with(textwrap.dedent(script), mounted, namespace=True)
    assert done.returncode == 6, done.stderr
    assert "pt_3.npz cannot be written: No space left on device" in done.stderr
    assert "the 2 patients of 4 written before are whole and stay" in done.stderr
    assert "4 of 4 patients" not in done.stderr
    assert done.stdout.strip() == "['pt_1.npz', 'pt_2.npz']"


def test_a_set_without_a_recipe_is_told_which_one_it_has(patients: Path, tmp_path: Path) -> None:
    import_openkbp(patients, tmp_path / "compact")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.npz").write_bytes(b"PK")
    for root in (patients, tmp_path / "compact"):
        with pytest.raises(DataError, match="looks like OpenKBP.*--recipe openkbp"):
            recognise(root)
    with pytest.raises(DataError, match="has no layout that is known"):
        recognise(tmp_path / "other")

"""`data cache` as it is typed: what is listed and freed, on stdout and stderr, and its exit codes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain.cli import main
from fasttrain.data.inventory import note_use
from fasttrain.machine.folder_lock import hold

Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with a set of each kind of volumes, the one of lmdb last used ten days ago, and compiled code."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FASTTRAIN_CACHE", str(folder))
    disk, lmdb = folder / "volumes" / "disk" / ("a" * 32), folder / "volumes" / "lmdb" / ("b" * 32)
    for place in (disk, lmdb, folder / "triton"):
        place.mkdir(parents=True)
    for name in ("0" * 32, "1" * 32):
        (disk / f"{name}.volume").write_bytes(b"fasttrain vol 1\n" + bytes(2000))
    (lmdb / "data.mdb").write_bytes(bytes(3 << 20))
    (folder / "triton" / "kernel.so").write_bytes(b"123")
    note_use(disk, "hippocampus", "/sets/hippocampus", "training", "float16")
    note_use(lmdb, "spleen", "/sets/spleen", "validation", "float32", entries=41)
    ten_days_ago = time.time() - 10 * 86400
    os.utime(lmdb / "about.json", (ten_days_ago, ten_days_ago))
    return folder


@pytest.fixture
def called(capsys: pytest.CaptureFixture[str]) -> Called:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.run(["data", "cache", *map(str, arguments)])
        return (ended.value.code or 0, *capsys.readouterr())  # type: ignore[return-value]

    return call


def sizes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


def test_the_table(called: Called, cache: Path) -> None:
    code, out, err = called()
    assert (code, err) == (0, "")
    assert called("--list") == (code, out, err)
    head, compiled, disk, lmdb, total = out.splitlines()
    assert head.split() == ["kind", "name", "entries", "size", "last", "used", "type", "part", "recipes", "data"]
    assert compiled.split()[:5] == ["compiled", "triton", "1", "3", "B"]
    for row, start, end in (
        (
            disk,
            ["disk", "aaaaaaaaaaaa", "2", "4.1", "KiB"],
            ["float16", "training", "hippocampus", "/sets/hippocampus"],
        ),
        (lmdb, ["lmdb", "bbbbbbbbbbbb", "41", "3.0", "MiB"], ["float32", "validation", "spleen", "/sets/spleen"]),
    ):
        assert row.split()[:5] == start
        assert row.split()[-4:] == end
    assert total == f"3.0 MiB in {cache}"


def test_the_document(called: Called, cache: Path) -> None:
    code, out, _ = called("--json")
    document = json.loads(out)
    assert code == 0
    assert document["folder"] == str(cache)
    assert document["bytes"] == sizes(cache) == sum(one["bytes"] for one in document["sets"])
    disk = document["sets"][1]
    assert disk["path"] == str(cache / "volumes" / "disk" / ("a" * 32))
    assert (disk["kind"], disk["entries"], disk["part"], disk["storage_dtype"]) == ("disk", 2, "training", "float16")
    assert (disk["recipes"], disk["data"]) == (["hippocampus"], ["/sets/hippocampus"])
    assert disk["last_used"] >= disk["made"]


def test_clean_names_what_it_frees(called: Called, cache: Path) -> None:
    size = sizes(cache)
    code, out, err = called("--clean")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"removed compiled {cache}/triton: 3 B"
    assert lines[1] == f"removed disk {cache}/volumes/disk/{'a' * 32} for hippocampus: 4.1 KiB"
    assert lines[2].startswith(f"removed lmdb {cache}/volumes/lmdb/{'b' * 32} for spleen: 3.0 MiB")
    assert lines[3] == f"freed 3.0 MiB in {cache}"
    assert sizes(cache) == 0
    assert size > 0
    assert called("--clean") == (0, f"nothing is stored in {cache}\n", "")


def test_only_what_is_old_or_of_one_recipe(called: Called, cache: Path) -> None:
    assert [one["kind"] for one in json.loads(called("--older-than", 9.5, "--json")[1])["sets"]] == ["lmdb"]
    assert json.loads(called("--older-than", 11, "--json")[1])["sets"] == []
    assert [one["kind"] for one in json.loads(called("--recipe", "hippocampus", "--json")[1])["sets"]] == ["disk"]
    document = json.loads(called("--clean", "--older-than", 9, "--json")[1])
    assert [(one["kind"], one["left"]) for one in document["sets"]] == [("lmdb", None)]
    assert document["freed_bytes"] == document["sets"][0]["freed_bytes"] == document["sets"][0]["bytes"]
    assert called("--clean", "--recipe", "spleen")[1] == (
        f"nothing is stored for the recipe spleen in {cache}; volumes are stored for hippocampus\n"
    )
    assert sorted(one["kind"] for one in json.loads(called("--json")[1])["sets"]) == ["compiled", "disk"]


def test_another_folder(called: Called, cache: Path, tmp_path: Path) -> None:
    code, out, err = called("--folder", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert f"--folder {tmp_path / 'nowhere'} does not exist" in err
    (tmp_path / "empty").mkdir()
    assert called("--folder", tmp_path / "empty") == (0, f"nothing is stored in {tmp_path / 'empty'}\n", "")
    found = json.loads(called("--folder", cache / "volumes", "--json")[1])
    assert [one["kind"] for one in found["sets"]] == ["disk", "lmdb"]


def test_what_is_in_use_is_left_with_one_line(called: Called, cache: Path) -> None:
    folder = cache / "volumes" / "lmdb" / ("b" * 32)
    held = hold(folder)
    code, out, err = called("--clean", "--recipe", "spleen")
    assert (code, out) == (0, f"freed 0 B in {cache}\n")
    assert err == f"fasttrain: lmdb {folder} for spleen is left: a running process uses it\n"
    held.release()
    assert called("--clean", "--recipe", "spleen")[1].endswith(f"freed 3.0 MiB in {cache}\n")


def test_what_cannot_be_removed_ends_with_6(called: Called, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name == "data.mdb":
            raise PermissionError(13, "Permission denied")
        genuine(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    code, out, err = called("--clean")
    assert code == 6
    assert err.count("\n") == 1
    assert "data.mdb cannot be removed (Permission denied)" in err
    assert "removed disk" in out  # all else is done
    code, out, err = called("--clean", "--json")
    assert (code, err.count("\n")) == (6, 1)
    document = json.loads(out)
    assert "data.mdb cannot be removed" in document["faults"][0]


def test_usage(called: Called, cache: Path) -> None:
    code, _, err = called("--list", "--clean")
    assert (code, err) == (2, "fasttrain: --list and --clean exclude each other; give one of them\n")
    assert called("--clean", "--older-than", -1)[0] == 2
    assert called("--older-than", "soon")[0] == 2
    assert sizes(cache) > 0


def test_torch_is_not_imported(called: Called, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("torch", "monai")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert called()[0] == 0
    assert called("--clean")[0] == 0


def test_nothing_of_a_name_or_an_age_names_what_there_is(called: Called, cache: Path) -> None:
    assert called("--recipe", "nope") == (
        0,
        f"nothing is stored for the recipe nope in {cache}; volumes are stored for hippocampus, spleen\n",
        "",
    )
    assert called("--clean", "--older-than", 99)[1] == f"nothing in {cache} was last used 99 days ago or earlier\n"


def test_a_cache_folder_that_was_never_made(called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "never"))
    assert called() == (0, f"nothing is stored in {tmp_path / 'never'}, which does not exist yet\n", "")

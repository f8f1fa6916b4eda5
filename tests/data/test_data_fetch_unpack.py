"""What comes out of an archive lies in its folder, whole, or nothing does: hostile, damaged and odd archives."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from fetch_server import CASES, Entry, contents, md5, serving, set_archive, set_files, tar_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.data.fetch import Patience, fetch
from fasttrain.data.fetch.archive import unpack
from fasttrain.data.sources.decathlon import read_decathlon
from fasttrain.errors import DataError, RecipeError, StorageError
from fasttrain.recipe import resolve

FILES = set_files(0.02)


class Silent:
    def say(self, sentence: str) -> None:
        pass

    def advance(self, what: str, done: int, total: int) -> None:
        pass


def of_kind(kind: bytes, name: str, target: str = "", size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.size = kind, target, size
    return entry


def get_file(tmp_path: Path, blob: bytes, name: str = "spleen", given_md5: str | None = None) -> Path:
    """Fetches the archive as a file of this machine, from a folder of its own."""
    (tmp_path / "archives").mkdir(exist_ok=True)
    archive = tmp_path / "archives" / "set.tar"
    archive.write_bytes(blob)
    folder = tmp_path / "data" / "set"
    fetch(name, folder, Silent(), archive.as_uri(), given_md5 or md5(blob))
    return folder


def all_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


HOSTILE: dict[str, list[Entry]] = {
    "dots": [("../evil", b"x")],
    "dots-inside": [("Task09_Spleen/imagesTr/../../../evil", b"x")],
    "absolute": [("/tmp/fasttrain-evil", b"x")],
    "symlink-out": [of_kind(tarfile.SYMTYPE, "Task09_Spleen/out", "../../.."), ("Task09_Spleen/out/evil", b"x")],
    "symlink-absolute": [of_kind(tarfile.SYMTYPE, "Task09_Spleen/out", "/etc/passwd")],
    "symlink-inside": [of_kind(tarfile.SYMTYPE, "Task09_Spleen/more", "imagesTr")],
    "hard-link": [of_kind(tarfile.LNKTYPE, "Task09_Spleen/out", "/etc/passwd")],
    "device": [of_kind(tarfile.CHRTYPE, "Task09_Spleen/null")],
    "block-device": [of_kind(tarfile.BLKTYPE, "Task09_Spleen/disk")],
    "pipe": [of_kind(tarfile.FIFOTYPE, "Task09_Spleen/pipe")],
    "folder-out": [of_kind(tarfile.DIRTYPE, "../evil-folder")],
    "macos-out": [("../._evil", b"x")],
    "unknown-kind": [of_kind(b"Q", "Task09_Spleen/odd")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused_and_nothing_lies_outside(tmp_path: Path, name: str) -> None:
    blob = set_archive(FILES, more=HOSTILE[name])
    with pytest.raises(DataError) as caught:
        get_file(tmp_path, blob)
    assert len(caught.value.faults) == 1
    assert "is not safe to unpack" in str(caught.value)
    assert repr(HOSTILE[name][0].name if isinstance(HOSTILE[name][0], tarfile.TarInfo) else HOSTILE[name][0][0]) in str(
        caught.value
    )
    # The user's own archive stays, and beside it there is only the empty folder that was looked into
    assert all_below(tmp_path) == {"archives", "archives/set.tar", "data"}
    assert not Path("/tmp/fasttrain-evil").exists()


def test_a_hostile_download_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    blob = set_archive(FILES, more=HOSTILE["dots"])
    with serving(blob) as server, pytest.raises(DataError, match="not safe"):
        fetch("spleen", tmp_path / "s", Silent(), server.address, md5(blob), Patience(0, 0.01, 5))
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["..", ".", "a", "b", "", "/", "._x", "dataset.json", "é\n", "a\\b"]), max_size=5))
def test_no_name_leads_out(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    base = tmp_path_factory.mktemp("names")
    (base / "set.tar").write_bytes(set_archive(FILES, more=[("/".join(parts), b"x")]))
    try:
        count = unpack(base / "set.tar", "it", base / "inside", lambda _: None, Silent())
        assert len(contents(base / "inside")) == count >= 1
    except DataError:
        assert not (base / "inside").exists()
    assert {path.name for path in base.iterdir()} <= {"set.tar", "inside"}


@pytest.mark.parametrize("top", ["Task09_Spleen/", "./Task09_Spleen/", "", "./"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_top_folder_is_stripped_and_the_set_can_be_read(tmp_path: Path, top: str, packed: bool) -> None:
    blob = set_archive(FILES, top)
    folder = get_file(tmp_path, gzip.compress(blob) if packed else blob)
    assert contents(folder) == FILES
    assert not list(folder.rglob("._*"))
    assert (folder / "dataset.json").stat().st_mtime == 1_500_000_000
    spec = resolve("spleen", []).recipe.data
    assert len(read_decathlon(spec, folder / "dataset.json").cases) == CASES
    assert all_below(tmp_path / "data") == {"set", *(f"set/{name}" for name in all_below(folder))}


def test_folders_and_files_beside_the_set(tmp_path: Path) -> None:
    more = [of_kind(tarfile.DIRTYPE, "Task09_Spleen/empty"), ("README", b"beside"), ("__MACOSX/dataset.json", b"mac")]
    assert contents(get_file(tmp_path, set_archive(FILES, more=more))) == FILES


@pytest.mark.parametrize(
    ("blob", "told"),
    [
        (b"", "cannot be read as a tar archive"),
        (b"x" * 20_000, "cannot be read as a tar archive"),
        (set_archive(FILES)[:9000], "lists 5 files that are missing or empty"),
        (gzip.compress(set_archive(FILES))[:-9000], "cannot be read as a tar archive"),
        (tar_of([]), "no dataset.json at its top, but no file"),
        (tar_of([("a/b/dataset.json", b"{}")]), "no dataset.json at its top, but a"),
        (tar_of([("a/b", b"x")]), "no dataset.json at its top, but a"),
        (set_archive({**FILES, "dataset.json": b"{"}), "mend the JSON"),
        (set_archive({**FILES, "dataset.json": b"{}"}), "lists no case"),
        (set_archive({**FILES, "dataset.json": b'{"training": [3]}'}), r"training\[0\]"),
        (set_archive({name: blob for name, blob in FILES.items() if "case_001" not in name}), "lists 2 files"),
        (set_archive({**FILES, "labelsTr/case_002.nii.gz": b""}), "lists 1 file that is missing or empty"),
        (set_archive(FILES, more=[("Task09_Spleen/dataset.json", b"{}")]), "holds twice"),
        (set_archive(FILES, more=[("Task09_Spleen/dataset.json/below", b"{}")]), "holds twice"),
    ],
)
def test_archives_that_are_no_set(tmp_path: Path, blob: bytes, told: str) -> None:
    with pytest.raises(DataError, match=told):
        get_file(tmp_path, blob)
    assert all_below(tmp_path) == {"archives", "archives/set.tar", "data"}


def test_a_tar_cut_short_in_its_last_file_leaves_nothing(tmp_path: Path) -> None:
    blob = tar_of([("t/dataset.json", FILES["dataset.json"]), ("t/big", os.urandom(50_000))])
    for cut in (len(blob) // 2, 40_000):
        with pytest.raises(DataError):
            get_file(tmp_path, blob[:cut])
        assert all_below(tmp_path / "data") == set()


def test_a_wrong_checksum_of_a_file_names_both_and_keeps_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        get_file(tmp_path, set_archive(FILES), given_md5="0" * 32)
    assert "0" * 32 in str(caught.value)
    assert md5((tmp_path / "archives" / "set.tar").read_bytes()) in str(caught.value)
    assert all_below(tmp_path) == {"archives", "archives/set.tar", "data"}


def test_what_a_killed_fetch_left_unpacked_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "data" / ".set.unpacking" / "imagesTr"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    folder = get_file(tmp_path, set_archive(FILES))
    assert contents(folder) == FILES
    assert {path.name for path in folder.parent.iterdir()} == {"set"}


def test_a_set_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """Placed by hand, or fetched and its archive left by a kill: nothing is asked of anybody."""
    folder = tmp_path / "s"
    for name, blob in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(blob)
    (tmp_path / "s.tar.part").write_bytes(b"x")
    fetched = fetch("spleen", folder, Silent(), "http://127.0.0.1:9/none", "0" * 32)
    assert fetched.already_there
    assert fetched.present.title == "Made"
    assert contents(folder) == FILES
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def test_a_folder_in_the_way_is_refused_and_kept(tmp_path: Path) -> None:
    blob = set_archive(FILES)
    folder = get_file(tmp_path, blob)
    with pytest.raises(DataError, match="holds the set spleen and not heart"):
        get_file(tmp_path, blob, "heart")
    (folder / "imagesTr" / "case_000.nii.gz").unlink()
    with pytest.raises(DataError, match=r"lists 1 file that is missing or empty: ./imagesTr/case_000.nii.gz; move"):
        get_file(tmp_path, blob)
    (folder / "dataset.json").unlink()
    with pytest.raises(DataError, match=r"and no dataset.json"):
        get_file(tmp_path, blob)
    assert (folder / "labelsTr" / "case_000.nii.gz").exists()
    for file in (folder, folder / "below"):
        with pytest.raises((DataError, StorageError)):
            fetch(
                "spleen",
                folder / "labelsTr" / "case_000.nii.gz" / file.name,
                Silent(),
                "http://127.0.0.1:9/x",
                "0" * 32,
            )
    with pytest.raises(DataError, match="is a file"):
        fetch("spleen", folder / "labelsTr" / "case_000.nii.gz", Silent(), "http://127.0.0.1:9/x", "0" * 32)


def test_an_empty_folder_and_a_link_are_filled(tmp_path: Path) -> None:
    (tmp_path / "data" / "set").mkdir(parents=True)
    assert contents(get_file(tmp_path, set_archive(FILES))) == FILES
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "set")
    archive = tmp_path / "archives" / "set.tar"
    fetch("spleen", tmp_path / "link", Silent(), archive.as_uri(), md5(archive.read_bytes()))
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path / "disk" / "set") == FILES


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="is the current folder itself"):
        fetch("spleen", Path(), Silent(), "http://127.0.0.1:9/x", "0" * 32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="cannot be written"):
        get_file(tmp_path, set_archive(FILES))


def test_where_it_came_from_is_noted_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    blob = set_archive(FILES)
    with serving(blob) as server:
        address = f"{server.address}?signature=secret"
        fetched = fetch("spleen", tmp_path / "s", Silent(), address, md5(blob), Patience(0, 0.01, 5))
    note = json.loads((tmp_path / "s" / ".fasttrain-fetched.json").read_text())
    assert note == {
        "set": "spleen", "task": "Task09_Spleen", "address": server.address, "md5": md5(blob), "files": len(FILES),
    }  # fmt: skip
    assert fetched.address == server.address


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("ftp://host/x.tar", "no address that begins with"),
        ("x.tar", "no address that begins with"),
        ("http:///x.tar", "names no server"),
        ("http://host:port/x", "is no address"),
        ("http://[::1/x", "is no address"),
        ("https://me:word@host/x.tar", "name or password"),
        ("http://host/a b.tar", "writes as %20"),
        ("file://other/x.tar", "is no file of this machine"),
        ("file:x.tar", "is no file of this machine"),
    ],
)
def test_addresses_that_cannot_be_used(tmp_path: Path, address: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told) as caught:
        fetch("spleen", tmp_path / "s", Silent(), address, "0" * 32)
    assert "word" not in str(caught.value).replace("password", "")
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_told_as_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.tar").write_bytes(b"")
    with pytest.raises(RecipeError, match=(tmp_path / "x.tar").as_uri()):
        fetch("spleen", tmp_path / "s", Silent(), "x.tar", "0" * 32)
    for path, told in ((tmp_path / "none.tar", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(DataError, match=told):
            fetch("spleen", tmp_path / "s", Silent(), path.as_uri(), "0" * 32)


def test_checksums_and_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="32 hexadecimal digits"):
        fetch("spleen", tmp_path / "s", Silent(), md5="abc")
    with pytest.raises(RecipeError, match="did you mean hippocampus"):
        fetch("hipocampus", tmp_path / "s", Silent())


def test_monais_table_is_used_where_no_address_is_given() -> None:
    from monai.apps import DecathlonDataset

    from fasttrain.data.fetch.catalogue import _ROUGH_MB, table_entry
    from fasttrain.data.location import DECATHLON_TASKS

    for task in DECATHLON_TASKS.values():
        address, checksum = table_entry(task)
        assert address == DecathlonDataset.resource[task]
        assert address.startswith("https://")
        assert address.endswith(f"/{task}.tar")
        assert checksum == DecathlonDataset.md5[task]
        assert len(checksum) == 32
    assert _ROUGH_MB.keys() == DECATHLON_TASKS.keys()


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar program")
def test_sparse_entries_are_whole(tmp_path: Path) -> None:
    """GNU tar -S stores only what is not a hole of a file; what is unpacked has its full size again."""
    files = {**FILES, "imagesTr/case_000.nii.gz": b"begin" + bytes(1 << 20) + b"end"}
    for name, blob in files.items():
        (tmp_path / "Task09_Spleen" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "Task09_Spleen" / name).write_bytes(blob)
    with open(tmp_path / "Task09_Spleen" / "imagesTr/case_000.nii.gz", "wb") as stream:
        stream.write(b"begin")
        stream.seek(1 << 20, io.SEEK_CUR)
        stream.write(b"end")
    subprocess.run(["tar", "-S", "-cf", "s.tar", "Task09_Spleen"], cwd=tmp_path, check=True)
    assert contents(get_file(tmp_path, (tmp_path / "s.tar").read_bytes())) == files


class Noting(Silent):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, sentence: str) -> None:
        self.said.append(sentence)


@pytest.mark.parametrize(
    ("top", "doubted"), [("Task04_Hippocampus/", True), ("mine/", True), ("Task09_Spleen/", False), ("", False)]
)
def test_an_archive_of_another_set_is_told_and_unpacked(tmp_path: Path, top: str, doubted: bool) -> None:
    blob, archive, watcher = set_archive(FILES, top), tmp_path / "x.tar", Noting()
    archive.write_bytes(blob)
    fetch("spleen", tmp_path / "set", watcher, archive.as_uri(), md5(blob))
    assert (tmp_path / "set/dataset.json").is_file()
    warnings = [sentence for sentence in watcher.said if sentence.startswith("warning: ")]
    assert len(warnings) == doubted
    if doubted:
        assert f"the top folder of {archive} is {top.strip('/')} and not Task09_Spleen" in warnings[0]


def test_the_checksum_of_an_own_archive_is_named_as_the_option_that_takes_it(tmp_path: Path) -> None:
    blob = set_archive(FILES)
    with pytest.raises(DataError, match=f"if the archive is yours and whole, add `--md5 {md5(blob)}`"):
        get_file(tmp_path, blob, given_md5="0" * 32)
    assert get_file(tmp_path, blob, given_md5=md5(blob)).is_dir()

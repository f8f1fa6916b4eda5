"""What folders lie on and whether it outlives the container, the room there, and the speed of disks."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from fasttrain.machine import mounts as mounts_module
from fasttrain.machine.diagnosis import Scene, disks
from fasttrain.machine.mounts import Mount, fate_of, in_container, kept_places, mount_of
from fasttrain.machine.patience import within

GIB = 1 << 30
LAYER = "27 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/a\n"


def scene(environ: Mapping[str, str] | None = None, container: bool = True) -> Scene:
    """A scene with a container, or without."""
    made = Scene(environ=environ or {})
    made.__dict__["container"] = container
    return made


@pytest.mark.parametrize(
    ("place", "kind", "container", "fate"),
    [
        ("/", "overlay", True, "container"),
        ("/", "overlay", False, "container"),
        ("/", "ext4", True, "container"),
        ("/", "btrfs", True, "container"),
        ("/", "ext4", False, "disk"),
        ("/home", "xfs", False, "disk"),
        ("/workspace", "xfs", True, "volume"),
        ("/workspace", "fuse.mfs", True, "network"),
        ("/workspace", "fuse", True, "network"),
        ("/workspace", "nfs4", True, "network"),
        ("/workspace", "fuse.juicefs", True, "network"),
        ("/workspace", "virtiofs", True, "network"),
        ("/workspace", "tmpfs", True, "memory"),
        ("/dev/shm", "tmpfs", False, "memory"),
        ("/", "fuse.fuse-overlayfs", True, "container"),
    ],
)
def test_what_becomes_of_files(place: str, kind: str, container: bool, fate: str) -> None:
    assert fate_of(Mount(Path(place), kind, "x"), container) == fate


def test_the_deepest_mount_holds_a_folder_and_a_later_one_covers_it(tmp_path: Path) -> None:
    inner = tmp_path / "in ner"
    inner.mkdir()
    escaped = str(inner.resolve()).replace(" ", "\\040")
    text = LAYER + f"90 27 8:17 /data {escaped} rw,noatime master:7 shared:3 - xfs /dev/sd\\040b rw\nnonsense\n"
    found = mount_of(inner / "not" / "there", text)
    assert found == Mount(inner.resolve(), "xfs", "/dev/sd b")
    assert (mount_of(tmp_path, text) or Mount(Path(), "", "")).kind == "overlay"
    assert (mount_of(inner, text + f"91 90 0:50 / {escaped} rw - tmpfs tmpfs rw\n") or found).kind == "tmpfs"
    assert mount_of(inner, "") is None


def test_a_container_is_told_by_its_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = "27 1 254:0 / / rw - ext4 /dev/sda rw\n"
    monkeypatch.setattr(mounts_module, "_MARKS", (tmp_path / "mark",))
    assert not in_container({}, plain)
    assert in_container({}, LAYER)
    assert in_container({"RUNPOD_POD_ID": "a1"}, plain)
    (tmp_path / "mark").touch()
    assert in_container({}, plain)


def test_volumes_that_can_be_written_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "workspace"
    volume.mkdir()
    (tmp_path / "hosts").touch()
    text = (
        LAYER
        + f"90 27 8:17 /v {volume} rw - xfs /dev/sdb rw\n"
        + f"91 27 8:17 /h {tmp_path / 'hosts'} rw - xfs /dev/sdb rw\n"
        + "92 27 8:17 /e /etc rw - xfs /dev/sdb rw\n"
    )
    assert kept_places(True, text) == [volume]
    assert kept_places(False, text) == []
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    assert kept_places(True, text) == []


@pytest.mark.parametrize(
    ("what", "mount", "environ", "state", "told"),
    [
        ("runs", Mount(Path("/"), "overlay", "overlay"), {}, "warning", "the container's own disk, which ends with it"),
        ("caches", Mount(Path("/"), "overlay", "overlay"), {}, "warning", "container's own disk"),
        ("data", Mount(Path("/"), "overlay", "overlay"), {}, "ok", "fetched again"),
        ("runs", Mount(Path("/dev/shm"), "tmpfs", "tmpfs"), {}, "warning", "in memory"),
        ("runs", Mount(Path("/workspace"), "xfs", "/dev/sdb"), {}, "ok", "outlives the container"),
        ("runs", Mount(Path("/workspace"), "xfs", "/dev/sdb"), {"RUNPOD_POD_ID": "a"}, "ok", "not its termination"),
        (
            "runs", Mount(Path("/workspace"), "xfs", "/dev/sdb"), {"RUNPOD_POD_ID": "a", "RUNPOD_VOLUME_ID": "b"},
            "ok", "a network volume, which outlives the pod",
        ),
        ("runs", Mount(Path("/workspace"), "fuse.mfs", "mfs#x"), {}, "ok", "outlives the container"),
    ],
)  # fmt: skip
def test_runs_and_caches_that_end_with_the_container_are_a_warning(
    what: str, mount: Mount, environ: dict[str, str], state: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "kept_places", lambda container: [Path("/vol")])
    found = disks.fate_finding(what, Path("/x/runs"), mount, scene(environ))
    assert (found.name, found.state) == (f"{what} volume", state)
    assert told in found.told
    assert ("/vol" in found.mend) is (state == "warning")
    monkeypatch.setattr(disks, "kept_places", lambda container: [])
    nowhere = disks.fate_finding(what, Path("/x/runs"), mount, scene(environ))
    assert ("mount a volume" in nowhere.mend) is (state == "warning")
    assert (
        disks.fate_finding(what, Path("/x"), Mount(Path("/"), "ext4", "/dev/sda"), scene(container=False)).state == "ok"
    )


@pytest.mark.parametrize(
    ("free", "need", "state"),
    [
        (1 << 20, None, "fault"),
        (GIB, None, "warning"),
        (3 * GIB, None, "ok"),
        (3 * GIB, 4 * GIB, "fault"),
        (5 * GIB, 4 * GIB, "warning"),
        (9 * GIB, 4 * GIB, "ok"),
    ],
)
def test_the_room_against_the_need(
    free: int, need: int | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "disk_free_bytes", lambda folder: free)
    found = disks.space_finding("runs space", tmp_path / "runs", need)
    assert found.state == state
    assert bool(found.mend) is (state != "ok")
    assert ("needed" in found.told) is (need is not None)


def test_the_need_of_a_recipe_is_asked_for_when_disks_are_looked_at(tmp_path: Path) -> None:
    made = Scene(runs=tmp_path / "runs", environ={"FASTTRAIN_CACHE": str(tmp_path)}, need=lambda: 3 << 20)
    assert "3 MiB needed for the checkpoints" in next(disks.space(made)).told


def test_a_disk_that_is_read_only_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_read_only", lambda folder: True)
    found = disks.space_finding("runs space", tmp_path / "runs", None)
    assert (found.state, found.told) == ("fault", f"the disk of {tmp_path} is read-only")
    assert "remount,rw" in found.mend


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # root may write anywhere
    found = disks.space_finding("runs space", tmp_path / "runs", None)
    assert (found.state, found.told) == ("fault", f"{tmp_path} cannot be written")


def test_writing_is_measured_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_SECONDS", 0.05)
    rate = disks.write_rate(tmp_path)
    assert rate is not None
    assert rate > 0
    assert list(tmp_path.iterdir()) == []

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disks.write_rate(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(disks, "disk_free_bytes", lambda folder: 1 << 20)
    assert disks.write_rate(tmp_path) is None


def test_reading_is_measured_on_the_largest_images(tmp_path: Path) -> None:
    assert disks.read_rate(tmp_path) is None
    (tmp_path / "notes.txt").write_bytes(b"x" * 1000)
    (tmp_path / "imagesTr").mkdir()
    for name, size in (("a.nii.gz", 1000), ("b.nii", 3_000_000), ("empty.nii", 0)):
        (tmp_path / "imagesTr" / name).write_bytes(os.urandom(size))
    (tmp_path / "imagesTr" / "dangling.nii").symlink_to(tmp_path / "none")
    assert [path.name for path in disks._largest_images(tmp_path)] == ["b.nii", "a.nii.gz", "empty.nii"]
    rate = disks.read_rate(tmp_path)
    assert rate is not None
    assert rate > 1e6
    with pytest.raises(OSError, match="No such file"):
        disks.read_rate(tmp_path / "none")


def test_slow_and_broken_disks_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Scene(runs=tmp_path / "runs", data=tmp_path)
    monkeypatch.setattr(disks, "write_rate", lambda folder: 1e6)
    monkeypatch.setattr(disks, "read_rate", lambda folder: 500e6)
    found = {one.name: one for one in disks.speed(looked)}
    assert (found["runs speed"].state, found["data speed"].state) == ("warning", "ok")
    assert found["runs speed"].told.startswith("written at 1 MB/s; ")
    assert found["data speed"].told == "read at 500 MB/s"

    def broken(folder: Path) -> float:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(disks, "write_rate", broken)
    monkeypatch.setattr(disks, "read_rate", broken)
    found = {one.name: one for one in disks.speed(looked)}
    assert found["runs speed"].told == "cannot be written: Input/output error"
    assert found["data speed"].state == "fault"
    monkeypatch.setattr(disks, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(disks, "write_rate", lambda folder: time.sleep(1))
    assert "no answer within 0.05 s" in next(disks.speed(looked)).told


def test_waiting_ends_and_errors_come_through() -> None:
    let_go = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        within(0.05, lambda: let_go.wait(30))
    assert time.monotonic() - began < 5
    let_go.set()
    assert within(5, lambda: 7) == 7
    assert within(5, lambda: None) is None
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])


def test_the_room_of_a_second_disk_is_told_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Scene(runs=tmp_path / "runs", environ={"FASTTRAIN_CACHE": str(tmp_path / "cache")})
    assert [one.name for one in disks.space(looked)] == ["runs space"]
    real = Path.stat

    def another(path: Path, *arguments: object, **more: object) -> object:
        return SimpleNamespace(st_dev=99) if path.name == "cache" else real(path)

    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(disks, "_device", lambda folder: another(folder if folder.exists() else folder.parent).st_dev)
    assert [one.name for one in disks.space(looked)] == ["runs space", "caches space"]

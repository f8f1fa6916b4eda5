"""What this process may use: cgroup files of both versions in a made folder, and the real ones of this machine."""

import os
from pathlib import Path

import psutil
import pytest

from fasttrain.machine import limits
from fasttrain.machine.limits import cpu_limit, memory_free_bytes, memory_limit_bytes

GIB = 1 << 30


class Groups:
    """A made /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "self"
        self.root.mkdir()
        self.own.write_text("0::/\n")

    def put(self, where: str, **files: object) -> None:
        folder = self.root / where
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    def at(self, lines: str) -> None:
        self.own.write_text(lines)

    @property
    def cpus(self) -> int:
        return cpu_limit(self.root, self.own)

    @property
    def limit(self) -> int | None:
        return memory_limit_bytes(self.root, self.own)

    @property
    def free(self) -> int:
        return memory_free_bytes(self.root, self.own)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    # Sixteen CPUs and a terabyte, so that only the quota of the made groups cuts
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1024 * GIB})())
    return Groups(tmp_path)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("350000 100000", 3),
        ("max 100000", 16),
        ("9900000 100000", 16),
        ("", 16),
        ("nonsense", 16),
        ("100000 0", 16),
    ],
)
def test_version_2_quota(groups: Groups, quota: str, cpus: int) -> None:
    groups.put("", cpu__max=quota)
    assert groups.cpus == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("400000", 4), ("20000", 1), ("-1", 16), ("0", 16)])
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_version_1_quota(groups: Groups, quota: str, cpus: int, folder: str) -> None:
    groups.at("3:memory:/pod\n2:cpu,cpuacct:/pod\n1:name=systemd:/\n")
    groups.put(f"{folder}/pod", cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
    assert groups.cpus == cpus


def test_the_tightest_parent_wins(groups: Groups) -> None:
    groups.at("0::/pods/mine/inner\n")
    groups.put("pods/mine/inner", cpu__max="800000 100000", memory__max=8 * GIB)
    groups.put("pods/mine", cpu__max="300000 100000", memory__max="max")
    groups.put("pods", cpu__max="max 100000", memory__max=4 * GIB)
    groups.put("pods/other", cpu__max="100000 100000", memory__max=GIB)
    assert groups.cpus == 3
    assert groups.limit == 4 * GIB


def test_a_container_sees_its_limits_at_the_mount(groups: Groups) -> None:
    groups.at("0::/kubepods/pod1/abc\n")
    groups.put("", cpu__max="200000 100000", memory__max=2 * GIB)
    assert groups.cpus == 2
    assert groups.limit == 2 * GIB


def test_no_groups_mean_no_limit(tmp_path: Path, groups: Groups) -> None:
    assert groups.cpus == 16
    assert groups.limit is None
    assert groups.free == 1024 * GIB
    assert cpu_limit(tmp_path / "none", tmp_path / "neither") == 16
    assert memory_limit_bytes(tmp_path / "none", tmp_path / "neither") is None


def test_the_affinity_mask_cuts_too(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {0}, raising=False)
    groups.put("", cpu__max="400000 100000")
    assert groups.cpus == 1


def test_version_2_memory(groups: Groups) -> None:
    groups.put("", memory__max=4 * GIB, memory__current=3 * GIB)
    assert (groups.limit, groups.free) == (4 * GIB, GIB)
    groups.put("", memory__stat=f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5")
    assert groups.free == 3 * GIB
    groups.put("", memory__max="max")
    assert (groups.limit, groups.free) == (None, 1024 * GIB)


def test_version_1_memory(groups: Groups) -> None:
    groups.at("4:memory:/pod\n")
    unlimited = 9223372036854771712
    groups.put("memory", memory__limit_in_bytes=unlimited, memory__usage_in_bytes=50 * GIB)
    assert (groups.limit, groups.free) == (None, 1024 * GIB)
    groups.put("memory/pod", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=4 * GIB)
    assert (groups.limit, groups.free) == (4 * GIB, 0)


def test_version_1_counts_the_page_cache_of_child_groups(groups: Groups) -> None:
    """A parent's use includes its children, whose cache only `total_inactive_file` knows."""
    groups.at("4:memory:/pod/inner\n")
    groups.put("memory/pod", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=4 * GIB)
    groups.put("memory/pod", memory__stat=f"inactive_file 0\ntotal_inactive_file {3 * GIB}")
    assert groups.free == 3 * GIB


def test_use_above_the_limit_leaves_nothing(groups: Groups) -> None:
    groups.put("", memory__max=GIB, memory__current=2 * GIB, memory__stat="inactive_file broken")
    assert groups.free == 0


def test_the_host_can_have_less_than_the_group(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": GIB})())
    groups.put("", memory__max=8 * GIB, memory__current=GIB)
    assert groups.free == GIB


def test_this_machine() -> None:
    assert 1 <= cpu_limit() <= (os.cpu_count() or 1)
    assert 0 < memory_free_bytes() <= psutil.virtual_memory().total
    limit = memory_limit_bytes()
    assert limit is None or limit > 0

"""Free memory and quotas where groups lie in groups, and where versions 1 and 2 are mounted side by side."""

from pathlib import Path

import psutil
import pytest
from fake_cgroup import own, put

from fasttrain.machine import limits
from fasttrain.machine.limits import cpu_limit, memory_free_bytes, memory_limit_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 900 * GIB})())
    return tmp_path / "cgroup"


@pytest.mark.parametrize("tight", ["pod", "pod/container", "pod/container/step"])
def test_free_memory_is_what_the_tightest_group_leaves(root: Path, tight: str) -> None:
    for place in ("pod", "pod/container", "pod/container/step"):
        limit = 8 * GIB if place == tight else 64 * GIB
        put(root / place, memory__max=limit, memory__current=6 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    group = own(root, "0::/pod/container/step\n")
    assert memory_free_bytes(root, group) == 3 * GIB
    assert memory_limit_bytes(root, group) == 8 * GIB


def test_the_least_free_is_not_the_least_limit(root: Path) -> None:
    """A sibling may have used the parent's memory up."""
    put(root / "pod", memory__max=64 * GIB, memory__current=63 * GIB)
    put(root / "pod/mine", memory__max=8 * GIB, memory__current=GIB)
    assert memory_free_bytes(root, own(root, "0::/pod/mine\n")) == GIB


def test_both_versions_side_by_side(root: Path) -> None:
    """systemd's hybrid layout: version 1 controllers beside an empty version 2 tree."""
    group = own(root, "5:memory:/pod\n4:cpu,cpuacct:/pod\n1:name=systemd:/pod\n0::/pod\n")
    put(root / "unified/pod")
    put(root / "cpu,cpuacct/pod", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    put(root / "memory/pod", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert cpu_limit(root, group) == 3
    assert memory_limit_bytes(root, group) == 2 * GIB
    assert memory_free_bytes(root, group) == GIB


def test_version_1_parents_bind_too(root: Path) -> None:
    group = own(root, "4:cpu:/pod/mine\n")
    put(root / "cpu/pod", cpu__cfs_quota_us=200000, cpu__cfs_period_us=100000)
    put(root / "cpu/pod/mine", cpu__cfs_quota_us=700000, cpu__cfs_period_us=100000)
    assert cpu_limit(root, group) == 2


def test_a_group_outside_the_namespace_reads_nothing_strange(root: Path) -> None:
    """A process moved out of its namespace's root sees `/..` in its path."""
    put(root, cpu__max="500000 100000")
    assert cpu_limit(root, own(root, "0::/../other\n")) == 5

"""What runs short on small machines: memory and who bounds it, shared memory, open files, and the count of killed processes."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_cgroup import own, put

from fasttrain.errors import MachineError
from fasttrain.machine import limits
from fasttrain.machine.limits import cpu_limit, memory_free, oom_kills, shared_memory_free_bytes
from fasttrain.machine.open_files import open_file_limit

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100 * GIB})())
    return tmp_path / "cgroup"


@pytest.mark.parametrize(("quota", "cpus"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64)])
def test_the_quota_on_64_cpus(root: Path, quota: str, cpus: int) -> None:
    put(root, cpu__max=quota)
    assert cpu_limit(root, own(root, "0::/\n")) == cpus


def test_what_bounds_the_memory_is_named(root: Path) -> None:
    group = own(root, "0::/pod\n")
    put(root / "pod", memory__max=8 * GIB, memory__current=3 * GIB)
    assert memory_free(root, group) == (5 * GIB, "the cgroup's limit")
    put(root / "pod", memory__max=500 * GIB)
    assert memory_free(root, group) == (100 * GIB, "the host")


def test_killed_processes_are_counted_in_both_versions(root: Path) -> None:
    second = own(root, "0::/pod/mine\n")
    assert oom_kills(root, second) is None
    put(root / "pod", memory__events="low 0\nhigh 0\nmax 9\noom 7\noom_kill 6\noom_group_kill 0")
    assert oom_kills(root, second) == 6
    put(root / "pod/mine", memory__events="oom 4\noom_kill 3")
    assert oom_kills(root, second) == 3
    first = own(root, "4:memory:/job\n")
    put(root / "memory/job", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    assert oom_kills(root, first) == 2
    put(root / "memory/job", memory__oom_control="oom_kill_disable 0\nunder_oom 0")
    assert oom_kills(root, first) is None


def test_a_folder_that_is_not_there_has_no_shared_memory(tmp_path: Path) -> None:
    assert shared_memory_free_bytes(tmp_path / "none") == 0


def test_the_room_is_what_the_file_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    free = shared_memory_free_bytes(tmp_path)
    assert free is not None
    assert abs(free - real.f_bavail * real.f_frsize) < GIB
    fields = {"f_blocks": 0, "f_bavail": 0, "f_frsize": 4096, "f_flag": 0}
    monkeypatch.setattr(limits.os, "statvfs", lambda _: type("Room", (), fields)())
    assert shared_memory_free_bytes(tmp_path) is None  # a tmpfs without a bound
    fields |= {"f_blocks": 4096, "f_bavail": 4096}
    assert shared_memory_free_bytes(tmp_path) == 16 << 20
    fields["f_flag"] = os.ST_RDONLY
    assert shared_memory_free_bytes(tmp_path) == 0


def test_the_open_file_limit_is_raised_to_the_hard_one() -> None:
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 300))\n"
        "from fasttrain.machine.open_files import open_file_limit, raise_open_file_limit\n"
        "print(open_file_limit(), raise_open_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "print(raise_open_file_limit())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["300", "300", "300", "300", "300"], done.stderr
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert open_file_limit() == (None if hard == resource.RLIM_INFINITY else hard)


def left_by(script: str) -> list[str]:
    """What a process prints that begins with `script`."""
    whole = (
        f"import resource\n{script}\nfrom fasttrain.machine.limits import memory_free\nprint(*memory_free(), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are kept by Linux")
@pytest.mark.parametrize(("limit", "option"), [("RLIMIT_AS", "-v"), ("RLIMIT_DATA", "-d")])
def test_a_limit_that_a_shell_set_bounds_the_memory(limit: str, option: str) -> None:
    gib = 1 << 30
    free, bound = left_by(f"resource.setrlimit(resource.{limit}, ({gib}, {gib}))")
    assert bound == f"the limit of this process (ulimit {option})"
    # What the interpreter itself takes is gone already
    assert 0 < int(free) < gib
    assert "ulimit" not in left_by("pass")[1]


def test_memory_without_proc_is_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "none"))
    free, bound = memory_free(tmp_path / "none", tmp_path / "none")
    assert free > 0
    assert bound == "the host"

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(limits.os, "sysconf", unknown)
    with pytest.raises(MachineError, match=r"/proc is not there; mount it \(`mount -t proc proc /proc`\)"):
        memory_free(tmp_path / "none", tmp_path / "none")

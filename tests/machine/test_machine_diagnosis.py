"""What `doctor` finds: each matter judged by itself, at its borders, and the whole on this machine."""

import json
import subprocess
import sys

import pytest
import torch

from fasttrain.cli.doctor_command import exit_code
from fasttrain.machine import diagnosis
from fasttrain.machine.cudnn import is_slow, slow_cudnn, version_text
from fasttrain.machine.diagnosis import Finding, compiler, cudnn, examine, failure_of, no_gpu, precisions


@pytest.mark.parametrize(
    ("version", "slow"),
    [
        (None, False),
        (8907, False),
        (90799, False),
        (90800, True),
        (91002, True),
        (91499, True),
        (91500, False),
        (91900, False),
    ],
)
def test_the_slow_versions_of_cudnn(version: int | None, slow: bool) -> None:
    assert is_slow(version) is slow
    told = slow_cudnn(version)
    assert (told is not None) is slow
    if told is not None and version is not None:
        assert told.startswith(f"cuDNN {version_text(version)} is one of those (9.8 to 9.14)")
        assert "install a torch with cuDNN 9.15 or later, such as 2.11" in told
        assert "nvidia-cudnn-cu12>=9.15" in told
    assert cudnn(version).state == ("warning" if slow or version is None else "ok")


@pytest.mark.parametrize(
    ("version", "text"), [(91002, "9.10.2"), (91900, "9.19.0"), (90800, "9.8.0"), (8907, "8.9.7"), (91501, "9.15.1")]
)
def test_versions_as_people_write_them(version: int, text: str) -> None:
    assert version_text(version) == text


def test_no_gpu_is_a_warning_unless_a_driver_says_that_there_is_one() -> None:
    assert no_gpu("this torch was built without CUDA", False).state == "warning"
    fault = no_gpu("this torch was built without CUDA", True)
    assert fault.state == "fault"
    assert "install a torch for CUDA" in fault.told
    assert no_gpu("CUDA_VISIBLE_DEVICES='' hides every GPU", True).state == "warning"


@pytest.mark.parametrize(
    ("capability", "state", "told"),
    [
        ((6, 1), "warning", "float32"),
        ((7, 0), "warning", "no bf16"),
        ((7, 5), "warning", "no bf16"),
        ((8, 0), "ok", "bf16, fp16"),
    ],
)
def test_what_a_gpu_computes_in(capability: tuple[int, int], state: str, told: str) -> None:
    found = precisions("gpu 0", capability)
    assert found.state == state
    assert told in found.told


def test_what_kernels_lack_is_a_warning_with_what_it_costs() -> None:
    assert compiler(None).state == "ok"
    lacking = compiler("there is no C compiler (install gcc)")
    assert lacking.state == "warning"
    assert lacking.told.startswith("there is no C compiler (install gcc); training runs without")


def test_a_kernel_that_fails_or_errs_is_a_fault_and_one_that_works_is_none() -> None:
    def failing() -> bool:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    assert failure_of(failing) == "no kernel image is available for execution on the device"
    assert failure_of(lambda: False) == "the result is wrong"
    assert failure_of(lambda: True) is None
    # The kernel itself, on what there is here
    assert failure_of(lambda: diagnosis._computes(torch.device("cpu"))) is None


def test_a_torch_that_cannot_be_loaded_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {one.name: one for one in examine()}
    assert found["torch"].state == "fault"
    assert "cannot be imported" in found["torch"].told
    assert found["memory"].state in ("ok", "warning")
    assert exit_code(list(found.values())) == 4


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "warning"), (64 << 30, "ok")])
def test_little_memory_is_a_warning(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "memory_free", lambda: (free, "the cgroup's limit"))
    monkeypatch.setattr(diagnosis, "shared_memory_free_bytes", lambda: free // 16)
    found = {one.name: one for one in examine()}
    assert found["memory"].state == state
    assert "bounded by the cgroup's limit" in found["memory"].told
    assert found["shared memory"].state == state


def test_the_exit_code_is_4_for_a_fault_alone() -> None:
    ok, warning, fault = (Finding("a", state, "b") for state in ("ok", "warning", "fault"))
    assert exit_code([ok, warning]) == 0
    assert exit_code([ok, fault, warning]) == 4


def test_the_command_tells_lines_and_a_document() -> None:
    command = [sys.executable, "-m", "fasttrain", "doctor"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=100)
    document = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=100).stdout)
    assert lines.returncode == document["exit_code"]
    shown = [line.split(None, 1)[0] for line in lines.stdout.splitlines()]
    assert shown == [one["state"] for one in document["findings"]]
    names = [one["name"] for one in document["findings"]]
    assert {"python", "torch", "cpus", "memory", "shared memory", "open files"} <= set(names)
    if not torch.cuda.is_available():
        (gpu,) = [one for one in document["findings"] if one["name"] == "gpu"]
        assert gpu["state"] in ("warning", "fault")
    assert len(names) == len(set(names))


@pytest.mark.gpu
def test_a_gpu_is_examined() -> None:
    found = {one.name: one for one in examine()}
    assert found["gpu 0 kernel"].state == "ok"
    assert torch.cuda.get_device_name(0) in found["gpu 0"].told
    assert "compute capability" in found["gpu 0 precision"].told
    assert {"cudnn", "kernels"} <= set(found)

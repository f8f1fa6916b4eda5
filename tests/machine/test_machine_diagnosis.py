"""What `doctor` finds: each matter judged by itself, at its borders, and the whole on this machine."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cards
import pytest
import torch

from fasttrain.cli.doctor_command import exit_code
from fasttrain.machine import diagnosis
from fasttrain.machine.cudnn import is_slow, slow_cudnn, version_text
from fasttrain.machine.diagnosis import Finding, Scene, examine, gpus, host, kernels, software
from fasttrain.machine.driver import Card
from fasttrain.machine.gpu_sight import Unseen

GIB = 1 << 30
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names no device."""
    for name in ("CUDA_VISIBLE_DEVICES", "RUNPOD_GPU_COUNT"):
        monkeypatch.delenv(name, raising=False)


def looked(look: Any, scene: Scene | None = None) -> dict[str, Finding]:
    """What one look finds, by name."""
    return {one.name: one for one in look(scene or Scene())}


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
    found = kernels.cudnn_finding(version)
    if told is not None and version is not None:
        assert told.startswith(f"cuDNN {version_text(version)} is one of those (9.8 to 9.14)")
        assert "install a torch with cuDNN 9.15 or later, such as 2.11" in told
        assert "nvidia-cudnn-cu12>=9.15" in told
        assert "four times slower" in found.told
        assert found.mend.startswith("pip install 'nvidia-cudnn-cu1")
    assert found.state == ("warning" if slow or version is None else "ok")
    assert bool(found.mend) is (found.state == "warning")


@pytest.mark.parametrize(
    ("version", "text"), [(91002, "9.10.2"), (91900, "9.19.0"), (90800, "9.8.0"), (8907, "8.9.7"), (91501, "9.15.1")]
)
def test_versions_as_people_write_them(version: int, text: str) -> None:
    assert version_text(version) == text


def test_no_gpu_is_a_warning_unless_there_is_one_that_cannot_be_used() -> None:
    absent = gpus.no_gpu(Unseen("there is no NVIDIA driver"))
    assert (absent.state, absent.told) == ("warning", "there is no NVIDIA driver; training runs on the CPU")
    assert gpus.no_gpu(Unseen("a", "b", fault=True)) == Finding("gpu", "fault", "a", "b")


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
    found = gpus.precisions("gpu 0", capability)
    assert found.state == state
    assert told in found.told


def test_memory_that_others_hold_is_told_with_their_ids() -> None:
    card = Card(fake_cards.SECOND, "Fake", 80 * GIB, 42 * GIB, (4711, 12))
    found = gpus.memory_of("gpu 0", 80 * GIB, 37 * GIB, card)
    assert found.state == "warning"
    assert found.told == "37.0 GiB of 80.0 GiB free; 42.0 GiB are held by 2 processes (4711 12)"
    assert found.mend.endswith("kill 4711 12")
    # In a container those numbers may be of other processes
    inside = gpus.memory_of("gpu 0", 80 * GIB, 37 * GIB, card, in_a_container=True)
    assert "by 2 processes outside of this container" in inside.told
    assert "kill" not in inside.mend
    assert "are held outside" in gpus.memory_of("gpu 0", 80 * GIB, 37 * GIB, replace(card, processes=())).told
    # What this process itself holds is not others'
    assert gpus.memory_of("gpu 0", 80 * GIB, 76 * GIB, replace(card, held_bytes=GIB)).state == "ok"
    # Without the driver's figure a little is CUDA's own
    assert gpus.memory_of("gpu 0", 80 * GIB, 79 * GIB, None).state == "ok"
    assert gpus.memory_of("gpu 0", 80 * GIB, 40 * GIB, None).state == "warning"


def test_the_drivers_card_is_found_by_torchs_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards.install(monkeypatch)
    driver = Scene().driver
    for uuid in (fake_cards.FIRST, fake_cards.SECOND):
        card = gpus.card_of(driver, uuid.removeprefix("GPU-"))
        assert card is not None
        assert card.uuid == uuid
    assert gpus.card_of(driver, "") is None
    assert gpus.card_of("NVML is not available", fake_cards.FIRST) is None
    fake_cards.install(monkeypatch, fake_cards.SPLIT)
    split = gpus.card_of(Scene().driver, fake_cards.INSTANCES[1].removeprefix("MIG-"))
    assert split is not None
    assert split.uuid == fake_cards.FIRST


@pytest.mark.parametrize(
    ("visible", "state", "told"),
    [
        ("1,0", "ok", "cuda:0 is card 1, cuda:1 is card 0"),
        (fake_cards.SECOND, "ok", "cuda:0 is card 1"),
        ("GPU-bbbb2222", "ok", "cuda:0 is card 1"),
        ("1,7,0", "warning", "cuda:0 is card 1; '7' names no card"),
        (None, None, ""),
        ("", None, ""),
        ("-1", None, ""),
    ],
)
def test_which_cards_are_visible(
    visible: str | None, state: str | None, told: str, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cards.install(monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = looked(software.visible_devices)
    assert (found["visible devices"].state if found else None) == state
    if found:
        assert told in found["visible devices"].told


def test_a_mig_instance_is_told_by_its_card(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards.install(monkeypatch, fake_cards.SPLIT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-dddd")
    told = looked(software.visible_devices)["visible devices"].told
    assert f"cuda:0 is the MIG instance {fake_cards.INSTANCES[1]} of card 0" in told


@cpu_only
@pytest.mark.parametrize(
    ("visible", "state", "told"),
    [
        (None, "fault", "was built without CUDA, and there is 2 × Fake H100"),
        ("1,0", "fault", "was built without CUDA"),
        (fake_cards.FIRST, "fault", "was built without CUDA"),
        ("GPU-bbbb", "fault", "was built without CUDA"),
        ("MIG-cccc", "fault", "names none that there is"),
        ("7", "fault", "names none that there is"),
        ("", "warning", "hides every GPU; training runs on the CPU"),
        ("-1", "warning", "hides every GPU; training runs on the CPU"),
    ],
)
def test_cards_that_torch_cannot_use(
    visible: str | None, state: str, told: str, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cards.install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = looked(gpus.gpus)["gpu"]
    assert found.state == state
    assert told in found.told
    assert found.mend


def test_the_driver_and_the_torch_that_was_built_for_another_cuda(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fake_cards.install(monkeypatch)
    assert looked(software.driver)["driver and torch"].state == "ok"
    assert looked(software.driver)["driver"].told == "580.95.05, CUDA 13.0; 2 × Fake H100"
    fake_cards.install(monkeypatch, cuda=12080, driver="570.1")
    scene = Scene()
    scene.__dict__["gpus"] = 0
    fault = looked(software.driver, scene)["driver and torch"]
    assert fault.state == "fault"
    assert "no more than CUDA 12.8" in fault.told
    assert fault.mend.endswith("whl/cu126")
    # Where it works all the same it is no fault
    scene.__dict__["gpus"] = 1
    assert looked(software.driver, scene)["driver and torch"].state == "ok"


def test_figures_that_will_be_missing_are_told_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cards.install(monkeypatch, init="raises")
    scene = Scene()
    scene.__dict__["gpus"] = 1
    found = looked(software.driver, scene)["driver"]
    assert found.state == "warning"
    assert "stay empty" in found.told
    scene.__dict__["gpus"] = 0
    assert looked(software.driver, scene) == {}


def test_a_kernel_that_fails_or_errs_is_a_fault_and_one_that_works_is_none() -> None:
    def failing() -> bool:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    assert gpus.failure_of(failing) == "no kernel image is available for execution on the device"
    assert gpus.failure_of(lambda: False) == "the result is wrong"
    assert gpus.failure_of(lambda: True) is None
    # The kernel itself, on what there is here
    assert gpus.failure_of(lambda: gpus._computes(torch.device("cpu"))) is None


@pytest.mark.parametrize(
    ("arches", "told"),
    [
        (["sm_70", "sm_80"], "is built for sm_70, sm_80, the GPU is sm_90"),
        (["sm_80", "compute_80"], "no kernel image"),
        (["sm_80", "sm_90"], "no kernel image"),
        ([], "no kernel image"),
    ],
)
def test_a_torch_without_code_for_the_gpu_is_named(
    arches: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: arches)
    properties = type("Properties", (), {"major": 9, "minor": 0})()
    assert told in gpus._why_not("no kernel image", properties, "no driver")[0]


def test_a_real_compile_and_what_it_says_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    if kernels.missing_for_c() is None:
        assert kernels.c_failure() is None
    compiler = tmp_path / "cc"
    compiler.write_text(
        "#!/bin/sh\necho 'probe.c:1:10: fatal error: limits.h: No such file or directory' >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(kernels, "missing_for_c", lambda: None)
    assert "fails (probe.c:1:10: fatal error: limits.h" in (kernels.c_failure() or "")
    scene = Scene()
    scene.__dict__["gpus"] = 1
    found = looked(kernels.compiler, scene)
    assert found["compiler"].state == "warning"
    assert "training runs without fasttrain's own kernels" in found["compiler"].told
    assert "apt-get install -y gcc" in found["compiler"].mend
    assert "triton" not in found
    scene.__dict__["gpus"] = 0
    assert looked(kernels.compiler, scene)["compiler"].state == "ok"


def test_triton_is_judged_by_what_its_process_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernels.triton_finding(None).state == "ok"
    lacking = kernels.triton_finding("Triton is not installed")
    assert lacking.state == "warning"
    assert lacking.told.startswith("Triton is not installed; training runs without")
    if not torch.cuda.is_available():
        # Without a GPU, or without Triton, the process fails and says so
        assert "Triton fails to compile or to run a kernel (" in (kernels.triton_failure() or "")


def test_a_torch_that_cannot_be_loaded_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {one.name: one for one in examine(Scene(runs=tmp_path))}
    assert found["torch"].state == "fault"
    assert "cannot be imported" in found["torch"].told
    assert found["memory"].state in ("ok", "warning")
    assert exit_code(list(found.values())) == 4


@pytest.mark.parametrize(("free", "state"), [(1 << 30, "warning"), (64 << 30, "ok")])
def test_little_memory_is_a_warning(free: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound, mend in (
        ("the cgroup's limit", "docker run --memory"),
        ("the limit of this process (ulimit -v)", "ulimit -v"),
    ):
        monkeypatch.setattr(host, "memory_free", lambda bound=bound: (free, bound))
        found = looked(host.memory)["memory"]
        assert found.state == state
        assert f"bounded by {bound}" in found.told
        assert (mend in found.mend) is (state == "warning")
    monkeypatch.setattr(host, "shared_memory_free_bytes", lambda: free // 16)
    found = looked(host.shared_memory)["shared memory"]
    assert found.state == state
    assert ("size" in found.mend) is (state == "warning")


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, state in ((256, "warning"), (1024, "ok"), (None, "ok")):
        monkeypatch.setattr(host, "open_file_limit", lambda limit=limit: limit)
        assert looked(host.open_files)["open files"].state == state


def test_what_the_environment_says_of_threads() -> None:
    def found(**environ: str) -> Finding:
        plain = Scene(environ=environ)
        plain.__dict__["gpus"] = 0
        return looked(host.threads, plain)["threads"]

    assert found().state == "ok"
    odd = found(OMP_NUM_THREADS="977")
    assert odd.state == "ok"
    assert "OMP_NUM_THREADS=977 of the environment does not count" in odd.told
    pinned = found(OMP_PROC_BIND="true", KMP_AFFINITY="disabled")
    assert (pinned.state, pinned.mend) == ("warning", "unset OMP_PROC_BIND")
    assert found(OMP_PROC_BIND="false", CUDA_LAUNCH_BLOCKING="1").state == "ok"  # without a GPU it slows nothing
    scene = Scene(environ={"CUDA_LAUNCH_BLOCKING": "1"})
    scene.__dict__["gpus"] = 1
    assert looked(host.threads, scene)["threads"].mend == "unset CUDA_LAUNCH_BLOCKING"


def test_a_look_that_fails_is_a_warning_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(scene: Scene) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "/proc/meminfo")
        yield

    monkeypatch.setitem(diagnosis.LOOKS, "memory", failing)
    found = {one.name: one for one in examine(Scene(runs=tmp_path))}
    assert found["memory"].state == "warning"
    assert "cannot be looked at (FileNotFoundError" in found["memory"].told
    assert "shared memory" in found


def test_the_exit_code_is_4_for_a_fault_alone() -> None:
    ok, warning, fault = (Finding("a", state, "b") for state in ("ok", "warning", "fault"))
    assert exit_code([ok, warning]) == 0
    assert exit_code([ok, fault, warning]) == 4


def doctor(folder: Path, *arguments: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """The command as a process in `folder`, with the stand-in for the driver, and how long it took."""
    path = os.pathsep.join([str(fake_cards.FOLDER), str(Path(__file__).parents[2])])
    hidden = ("CUDA_VISIBLE_DEVICES", "FASTTRAIN_DATA")
    given = {name: value for name, value in os.environ.items() if name not in hidden}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fasttrain", "doctor", *arguments],
        capture_output=True, text=True, timeout=100, cwd=folder, env={**given, "PYTHONPATH": path, **environ},
    )  # fmt: skip
    return done, time.monotonic() - began


@cpu_only
def test_the_command_tells_lines_with_two_cards_that_torch_cannot_use(tmp_path: Path) -> None:
    done, seconds = doctor(tmp_path, FAKE_NVML=fake_cards.settings(), CUDA_VISIBLE_DEVICES="1,0")
    assert done.returncode == 4
    assert seconds < 30
    lines = done.stdout.splitlines()
    states = [line.split(None, 1)[0] for line in lines if not line.startswith(" ")]
    assert set(states) <= {"ok", "warning", "fault"}
    assert all(line.strip().startswith("mend: ") for line in lines if line.startswith(" "))
    fault = next(number for number, line in enumerate(lines) if line.startswith("fault"))
    # pip's own torch for Linux is built for CUDA on every machine
    built = torch.version.cuda is not None
    told = (
        "there is 2 × Fake H100, but CUDA does not start: "
        if built
        else "built without CUDA, and there is 2 × Fake H100"
    )
    assert told in lines[fault]
    assert f"mend: {'nvidia-smi; ' if built else 'pip install --force-reinstall torch'}" in lines[fault + 1]
    assert "cuda:0 is card 1, cuda:1 is card 0" in done.stdout
    assert f"1 fault, {states.count('warning')} warning" in done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_the_command_gives_a_document_where_the_driver_raises(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.nii.gz").write_bytes(os.urandom(1 << 20))
    done, _ = doctor(
        tmp_path, "--json", "--data", "set", "--recipe", "demo", FAKE_NVML=fake_cards.settings(init="raises")
    )
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"]
    found = {one["name"]: one for one in document["findings"]}
    assert len(found) == len(document["findings"])
    names = {"python", "torch", "compiler", "cpus", "memory", "shared memory", "open files", "threads", "runs space"}
    assert names | {"data speed"} <= set(found)
    assert all(set(one) == {"name", "state", "told", "mend"} for one in found.values())
    assert all(one["mend"] for one in found.values() if one["state"] == "fault")
    if not torch.cuda.is_available():
        assert (done.returncode, found["gpu"]["state"]) == (0, "warning")
    assert "needed for the checkpoints of this recipe" in found["runs space"]["told"]
    misspelt, _ = doctor(tmp_path, "--recipe", "dmeo")
    assert (misspelt.returncode, misspelt.stdout) == (2, "")
    missing, _ = doctor(tmp_path, "--data", "none")
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "--data none: there is no such folder" in missing.stderr


@pytest.mark.gpu
def test_a_gpu_is_examined(tmp_path: Path) -> None:
    found = {one.name: one for one in examine(Scene(runs=tmp_path))}
    assert found["gpu 0 kernel"].state == "ok"
    assert torch.cuda.get_device_name(0) in found["gpu 0"].told
    assert "compute capability" in found["gpu 0 precision"].told
    assert {"driver", "driver and torch", "gpu 0 memory", "cudnn", "compiler", "triton"} <= set(found)
    assert found["triton"].state == "ok"

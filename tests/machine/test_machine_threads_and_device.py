"""Thread pools are sized before torch loads; a device that is not there is a sentence with its reason."""

import os
import subprocess
import sys

import pytest
import torch
from fake_cards import install

from fasttrain.errors import EXIT_MACHINE, MachineError, RecipeError
from fasttrain.machine import hardware
from fasttrain.machine.hardware import environment_record, passed_over, survey, wants_gpu
from fasttrain.machine.limits import cpu_limit
from fasttrain.machine.threads import THREAD_VARIABLES, limit_threads, probably_on_gpu, thread_count

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_variable_and_torchs_own_pool_are_set(threads) -> None:
    environ = {"OMP_NUM_THREADS": "77", "OTHER": "x"}
    limit_threads(1, environ)
    assert environ == {**dict.fromkeys(THREAD_VARIABLES, "1"), "OMP_WAIT_POLICY": "PASSIVE", "OTHER": "x"}
    kept = {"OMP_WAIT_POLICY": "ACTIVE"}
    limit_threads(1, kept)
    assert kept["OMP_WAIT_POLICY"] == "ACTIVE"
    assert torch.get_num_threads() == 1
    limit_threads(2, environ)
    assert torch.get_num_threads() == 2


def test_the_count_and_its_reason() -> None:
    assert thread_count(3, on_gpu=False) == (3, "set in the recipe")
    assert thread_count("auto", on_gpu=False)[0] == cpu_limit()
    assert thread_count("auto", on_gpu=True)[0] == min(cpu_limit(), 4)
    assert str(cpu_limit()) in thread_count("auto", on_gpu=False)[1]


def test_a_command_sets_the_pools_before_torch_loads() -> None:
    program = """
import sys
from fasttrain.cli import run_commands
from fasttrain.recipe import resolve
run_commands._limit_threads(resolve("demo", ["acceleration.threads=1"]).recipe, "cpu")
assert "torch" not in sys.modules and "numpy" not in sys.modules
import torch
print(torch.get_num_threads())
"""
    environ = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr


@pytest.mark.parametrize(
    ("setting", "wanted"), [("auto", None), ("cpu", False), ("cuda", True), ("cuda:0", True), ("cuda:12", True)]
)
def test_device_text(setting: str, wanted: bool | None) -> None:
    assert wants_gpu(setting) is wanted


@pytest.mark.parametrize(
    "setting", ["", "gpu", "CUDA", "cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "cpu:0", "cuda0", "mps"]
)
def test_other_device_text_is_refused(setting: str) -> None:
    with pytest.raises(RecipeError, match="should be auto, cpu, cuda or cuda:N"):
        wants_gpu(setting)


def test_the_guess_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probably_on_gpu("cuda:1")
    assert not probably_on_gpu("cpu")
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probably_on_gpu("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not probably_on_gpu("auto")
    for hidden in ("-1", " -1", "-1,0", "none", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not probably_on_gpu("auto")
    for left in ("0", "1,0", "GPU-aaaa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", left)
        assert probably_on_gpu("auto")


def test_a_survey_of_the_cpu() -> None:
    found = survey("cpu")
    assert (found.device, found.on_gpu, found.torch_device.type) == ("cpu", False, "cpu")
    assert found.device_name
    assert found.cpus == cpu_limit()
    assert found.memory_free_gib > 0
    assert found.gpu_gib is None


@no_gpu
def test_auto_falls_back_to_the_cpu() -> None:
    assert survey("auto").device == "cpu"


@no_gpu
@pytest.mark.parametrize("setting", ["cuda", "cuda:7"])
def test_no_gpu_is_told_with_a_reason(setting: str) -> None:
    with pytest.raises(MachineError) as caught:
        survey(setting)
    (sentence,) = caught.value.faults
    assert caught.value.exit_code == EXIT_MACHINE == 4
    assert sentence.startswith(f"--device {setting}: ")
    assert "without CUDA" in sentence or "no NVIDIA driver" in sentence or "hides every GPU" in sentence
    assert "--device cpu" in sentence


@pytest.mark.parametrize(
    ("cuda", "visible", "said"),
    [
        (None, None, "was built without CUDA"),
        (None, "", "CUDA_VISIBLE_DEVICES='' hides"),
        ("12.8", None, "no NVIDIA driver"),
    ],
)
@no_gpu
def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, cuda: str | None, visible: str | None, said: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert said in hardware.why_no_gpu()


@no_gpu
def test_auto_that_passes_a_gpu_over_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    told = passed_over("auto", survey("auto"))
    assert told is not None
    assert "2 × Fake H100; training runs on the CPU (mend: pip install" in told
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    told = passed_over("auto", survey("auto"))
    assert told is not None
    assert "there is 2 × Fake H100, but CUDA does not start: " in told
    assert ".;" not in told
    assert told.endswith("; training runs on the CPU (mend: nvidia-smi; restart the pod)")
    assert passed_over("cpu", survey("cpu")) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert passed_over("auto", survey("auto")) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    install(monkeypatch, init="no driver")
    assert passed_over("auto", survey("auto")) is None


def test_a_gpu_number_that_is_too_high_names_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    with pytest.raises(MachineError, match=r"cuda:7: there is no such device; there are cuda:0 \(Card 0\)"):
        survey("cuda:7")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_survey_of_the_gpu() -> None:
    found = survey("cuda")
    assert found.device == "cuda:0"
    assert found.gpu_gib
    assert found.compute_capability
    with pytest.raises(MachineError, match="no such device"):
        survey(f"cuda:{torch.cuda.device_count()}")


def test_the_environment_record_holds_versions_and_what_changes_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    record = environment_record(survey("cpu"))
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert record["variables"]["OMP_NUM_THREADS"] == "5"
    assert "hush" not in str(record)

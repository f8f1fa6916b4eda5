"""CUDA_VISIBLE_DEVICES is read as CUDA reads it, and why no GPU is seen is told by its one cause."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cards import CARDS, FIRST, INSTANCES, SECOND, SPLIT, install
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.machine.driver import Card, Driver, read_driver
from fasttrain.machine.gpu_sight import Sight, torch_for, why_unseen
from fasttrain.machine.pod_variables import with_pod_variables
from fasttrain.machine.visible_devices import Chosen, chosen, hides_all

BOTH = [FIRST, SECOND]


@pytest.mark.parametrize(
    ("text", "cards", "refused"),
    [
        (None, (0, 1), None),
        ("0", (0,), None),
        ("1,0", (1, 0), None),
        (" 1 , 0 ", (1, 0), None),
        ("1gpu,0x", (1, 0), None),
        ("+1,-0", (1, 0), None),
        (FIRST, (0,), None),
        (f"{SECOND},{FIRST}", (1, 0), None),
        ("GPU-bbbb", (1,), None),
        ("GPU-b,GPU-a", (1, 0), None),
        # What hides all, or all that follows
        ("", (), ""),
        ("-1", (), "-1"),
        (" -1", (), " -1"),
        ("-1,0", (), "-1"),
        ("none", (), "none"),
        ("NoDevFiles", (), "NoDevFiles"),
        ("7", (), "7"),
        ("0,7,1", (0,), "7"),
        ("1,-1,0", (1,), "-1"),
        ("0,0", (), "0"),
        ("GPU-", (), "GPU-"),
        ("GPU-ffff", (), "GPU-ffff"),
        (f"{FIRST},GPU-aaaa", (), "GPU-aaaa"),
        (f"{FIRST},1", (0,), "1"),
        ("MIG-cccc", (), "MIG-cccc"),
    ],
)
def test_the_cards_that_are_left(text: str | None, cards: tuple[int, ...], refused: str | None) -> None:
    assert chosen(text, BOTH) == Chosen(cards, None, refused)


@pytest.mark.parametrize("text", ["", " ", "-1", " -1", "-1,0", "none", "NoDevFiles", "0,0", ",0", "void"])
def test_what_hides_all_whatever_there_is(text: str) -> None:
    assert hides_all(text)


@pytest.mark.parametrize("text", [None, "0", "7", "1,0", "0,-1", FIRST, "GPU-a", INSTANCES[0], "+0"])
def test_what_may_leave_one(text: str | None) -> None:
    assert not hides_all(text)


def test_one_mig_instance_is_taken_and_no_more() -> None:
    instances = {0: INSTANCES}
    assert chosen(INSTANCES[1], [FIRST], instances) == Chosen((0,), INSTANCES[1])
    assert chosen("MIG-dddd", [FIRST], instances) == Chosen((0,), INSTANCES[1])
    assert chosen(",".join(INSTANCES), [FIRST], instances) == Chosen((0,), INSTANCES[0])
    assert chosen(f"MIG-{SECOND}/1/0", BOTH, instances) == Chosen((1,), f"MIG-{SECOND}/1/0")
    assert chosen("MIG-eeee", [FIRST], instances) == Chosen((), refused="MIG-eeee")


@given(st.text(alphabet="01-+, GPUMIaebn.", max_size=14))
def test_whatever_is_written_there_gives_cards_that_there_are(text: str) -> None:
    found = chosen(text, BOTH)
    assert set(found.cards) <= {0, 1}
    assert len(set(found.cards)) == len(found.cards)
    assert not (hides_all(text) and found.cards)
    # torch, which follows the driver, finds as many entries as may count
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", text)
        try:
            entries = torch.cuda._parse_visible_devices()
        except ValueError:  # a sign without a number, which it cannot read
            return
    if any(isinstance(one, str) for one in entries):
        assert list(found.cards) == torch.cuda._transform_uuid_to_ordinals(entries, BOTH)
    else:
        assert list(found.cards) == list(itertools.takewhile(lambda one: one < len(BOTH), entries))


def driver(*cards: Card, cuda: tuple[int, int] = (13, 0)) -> Driver:
    return Driver("580.95.05", cuda, cards)


H100 = Card(FIRST, "Fake H100", 80 << 30, 0)
SIGHT = Sight("2.11.0+cu130", "13.0", "", "NVML is not available", False, None, False, {})


@pytest.mark.parametrize(
    ("change", "told", "fault", "mend"),
    [
        ({}, "there is no NVIDIA driver", False, ""),
        ({"torch_cuda": None, "torch_version": "2.11.0+cpu"}, "this torch (2.11.0+cpu) was built without CUDA", False, ""),
        (
            {"torch_cuda": None, "torch_version": "2.11.0+cpu", "driver": driver(H100, H100)},
            "built without CUDA, and there is 2 × Fake H100", True, "whl/cu130",
        ),
        ({"torch_cuda": None, "devices": True}, "without CUDA, and there is a GPU", True, "whl/cu126"),
        ({"container": True}, "no NVIDIA driver is seen", False, "--gpus all"),
        ({"container": True, "host_driver": "580.95"}, "started without its GPUs", True, "--gpus all"),
        ({"container": True, "host_driver": "580.95", "torch_cuda": None}, "started without its GPUs", False, "--gpus all"),
        ({"host_driver": "580.95"}, "no device of it is there", True, "nvidia-modprobe"),
        ({"container": True, "environ": {"RUNPOD_GPU_COUNT": "0"}}, "zero GPUs", True, "network volume"),
        ({"container": True, "environ": {"RUNPOD_GPU_COUNT": "1"}}, "no NVIDIA device is there", True, "restart the pod"),
        ({"driver": driver(H100), "environ": {"CUDA_VISIBLE_DEVICES": ""}}, "='' hides every GPU", False, "unset"),
        ({"driver": driver(H100), "environ": {"CUDA_VISIBLE_DEVICES": " -1"}}, "hides every GPU", False, "unset"),
        ({"driver": driver(H100), "environ": {"CUDA_VISIBLE_DEVICES": "7"}}, "names none that there is", True, "=0"),
        ({"driver": driver(H100), "environ": {"CUDA_VISIBLE_DEVICES": "GPU-bb"}}, FIRST, True, "=0"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": "7"}}, "there is no NVIDIA driver", False, ""),
        ({"driver": driver(H100, cuda=(12, 4))}, "runs CUDA 12.4 at most", True, "whl/cu126"),
        ({"driver": driver(H100, cuda=(11, 8))}, "runs CUDA 11.8 at most", True, "newer driver"),
        ({"driver": driver(replace(H100, instances=()))}, "MIG mode and has no instance", True, "nvidia-smi mig"),
        ({"devices": True, "driver": "NVMLError: Driver/library version mismatch"}, "of two versions", True, "restart"),
        ({"driver": driver(H100), "torch_error": "CUDA unknown error"}, "does not start: CUDA unknown error", True, "nvidia-smi"),
    ],
)  # fmt: skip
def test_the_one_cause(change: dict[str, Any], told: str, fault: bool, mend: str) -> None:
    found = why_unseen(replace(SIGHT, **change))
    assert told in found.told
    assert found.fault is fault
    assert mend in found.mend
    assert found.mend or not found.fault


def test_the_pods_variables_are_found_over_ssh_too(tmp_path: Path) -> None:
    kept = tmp_path / "rp_environment"
    assert with_pod_variables({"A": "b"}, kept) == {"A": "b"}
    kept.write_text("export RUNPOD_POD_ID=\"p1\"\nexport RUNPOD_GPU_COUNT=0\nPATH=/odd\nRUNPOD_DC_ID='EU'\n")
    expected = {"A": "b", "RUNPOD_POD_ID": "p1", "RUNPOD_GPU_COUNT": "0", "RUNPOD_DC_ID": "EU"}
    assert with_pod_variables({"A": "b"}, kept) == expected
    assert with_pod_variables({"RUNPOD_POD_ID": "p2"}, kept) == {"RUNPOD_POD_ID": "p2"}


@pytest.mark.parametrize(
    ("cuda", "index"), [((13, 1), "cu130"), ((13, 0), "cu130"), ((12, 9), "cu126"), ((12, 0), "cu126"), (None, "cu126")]
)
def test_the_torch_that_a_driver_runs(cuda: tuple[int, int] | None, index: str) -> None:
    assert torch_for(Driver("x", cuda, ())).endswith(index)


def test_the_driver_as_it_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    found = read_driver()
    assert isinstance(found, Driver)
    assert (found.version, found.cuda) == ("580.95.05", (13, 0))
    assert [card.uuid for card in found.cards] == BOTH
    assert (found.cards[1].held_bytes, found.cards[1].processes) == (42 << 30, (4711,))
    assert found.cards[0].instances is None
    assert found.chosen({"CUDA_VISIBLE_DEVICES": "1,0"}).cards == (1, 0)
    install(monkeypatch, SPLIT)
    split = read_driver()
    assert isinstance(split, Driver)
    assert split.cards[0].instances == tuple(INSTANCES)
    assert split.chosen({"CUDA_VISIBLE_DEVICES": "MIG-dddd"}) == Chosen((0,), INSTANCES[1])


@pytest.mark.parametrize(
    ("how", "told"), [("raises", "version mismatch"), ("no driver", "Not Loaded"), ("odd", "libnvidia-ml")]
)
def test_a_driver_that_cannot_be_asked_is_a_reason(how: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, init=how)
    found = read_driver()
    assert isinstance(found, str)
    assert told in found


def test_a_library_that_lacks_everything_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch)
    for name in [name for name in vars(module) if name.startswith("nvml") and name != "nvmlInit"]:
        monkeypatch.delattr(module, name)
    assert read_driver() == Driver(None, None, ())


def test_nonsense_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, figures="nonsense")
    found = read_driver()
    assert isinstance(found, Driver)
    assert [(card.name, card.total_bytes, card.held_bytes, card.processes) for card in found.cards] == [
        (card["name"], None, None, ()) for card in CARDS
    ]

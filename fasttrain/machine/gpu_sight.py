"""Owns why this process sees no GPU: the one cause, by what torch, the driver, the container and the environment tell."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fasttrain.machine.driver import Driver, read_driver
from fasttrain.machine.mounts import in_container
from fasttrain.machine.pod_variables import with_pod_variables
from fasttrain.machine.visible_devices import VARIABLE, hides_all

_OLDEST_CUDA = (12, 0)
"""That torch 2.8 and later are built for; a driver of one CUDA 12 runs what was built for any other."""


@dataclass(frozen=True)
class Sight:
    """What there is to go by. `torch_cuda`: the CUDA that torch was built for; `torch_error`: what torch says when it starts
    CUDA; `driver`: what NVML tells, or why it does not; `devices`: whether a card's device file is there; `host_driver`: the
    kernel's driver, which a container sees also where it was given no card.
    """

    torch_version: str
    torch_cuda: str | None
    torch_error: str
    driver: Driver | str
    devices: bool
    host_driver: str | None
    container: bool
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Unseen:
    """Why no GPU is seen. `fault`: there is one, or one is paid for, and nobody hid it; `mend`: the command that helps."""

    told: str
    mend: str = ""
    fault: bool = False


def look(driver: Driver | str | None = None) -> Sight:
    """Gathers the facts; loads torch. `driver`: what is known of it already."""
    import torch

    environ = with_pod_variables(os.environ)
    return Sight(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        torch_error=_torch_error() if torch.version.cuda else "",
        driver=read_driver() if driver is None else driver,
        devices=bool(list(Path("/dev").glob("nvidia[0-9]*"))) or os.path.exists("/dev/dxg"),
        host_driver=_host_driver(),
        container=in_container(environ),
        environ=environ,
    )


def why_unseen(sight: Sight) -> Unseen:
    """The one cause, the nearest to the user first: a variable, then the torch, then what the machine lacks."""
    there = sight.devices or (isinstance(sight.driver, Driver) and bool(sight.driver.cards))
    hidden = _hidden(sight)
    if hidden is not None and (there or not hidden.fault):
        return hidden
    if not there:
        return _none_there(sight)
    if sight.torch_cuda is None:
        return Unseen(
            f"this torch ({sight.torch_version}) was built without CUDA, and there is {cards_told(sight.driver)}",
            torch_for(sight.driver),
            fault=True,
        )
    return _not_started(sight)


def torch_for(driver: Driver | str) -> str:
    """The command that installs a torch which a driver can run."""
    newest = driver.cuda if isinstance(driver, Driver) else None
    if newest is not None and newest < _OLDEST_CUDA:
        return "a newer driver (525 or later): update it, or rent another machine"
    index = "cu130" if newest is not None and newest >= (13, 0) else "cu126"
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}"


def cards_told(driver: Driver | str) -> str:
    """The cards in a sentence."""
    if isinstance(driver, str) or not driver.cards:
        return "a GPU"
    names = [card.name for card in driver.cards]
    counts = {name: names.count(name) for name in names}
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())


def _hidden(sight: Sight) -> Unseen | None:
    text = sight.environ.get(VARIABLE)
    if text is None:
        return None
    if hides_all(text):
        return Unseen(f"{VARIABLE}={text!r} hides every GPU", f"unset {VARIABLE}")
    if isinstance(sight.driver, str) or sight.driver.chosen(sight.environ).cards:
        return None
    there = ", ".join(f"{number} ({card.uuid})" for number, card in enumerate(sight.driver.cards))
    told = f"{VARIABLE}={text!r} hides every GPU: it names none that there is, which are {there or 'none'}"
    return Unseen(told, f"export {VARIABLE}=0", fault=True)


def _none_there(sight: Sight) -> Unseen:
    environ, without = (
        sight.environ,
        "" if sight.torch_cuda else f"; this torch ({sight.torch_version}) was built without CUDA",
    )
    if environ.get("RUNPOD_GPU_COUNT") == "0":
        return Unseen(
            "this pod was started with zero GPUs, as RunPod does where the machine that keeps its volume has none free",
            "stop it and start it later, or rent a new pod with a network volume",
            fault=True,
        )
    if environ.get("RUNPOD_GPU_COUNT", "").isdigit():
        return Unseen(
            f"this pod has {environ['RUNPOD_GPU_COUNT']} GPU by RUNPOD_GPU_COUNT, and no NVIDIA device is there",
            "restart the pod; if that does not help, rent another and tell RunPod",
            fault=True,
        )
    if sight.container and sight.host_driver is not None:
        return Unseen(
            f"the host has an NVIDIA driver ({sight.host_driver}), and this container was started without its GPUs",
            "docker run --gpus all … (with nvidia-container-toolkit on the host), or a limit of nvidia.com/gpu: 1 in Kubernetes",
            fault=sight.torch_cuda is not None,
        )
    if sight.container:
        return Unseen(
            f"no NVIDIA driver is seen: the host has none, or this container was started without GPUs{without}",
            "docker run --gpus all … on a host with a GPU",
        )
    if sight.host_driver is not None:
        return Unseen(
            f"NVIDIA's driver is loaded ({sight.host_driver}), and no device of it is there{without}",
            "nvidia-modprobe -u -c=0, or restart the machine",
            fault=True,
        )
    return Unseen(f"there is no NVIDIA driver{without}")


def _not_started(sight: Sight) -> Unseen:
    """torch is built for CUDA, a card is there, and CUDA does not start."""
    driver = sight.driver
    if isinstance(driver, Driver):
        empty = [number for number, card in enumerate(driver.cards) if card.instances == ()]
        if empty and len(empty) == len(driver.cards):
            return Unseen(
                f"card {empty[0]} is in MIG mode and has no instance",
                f"nvidia-smi mig -i {empty[0]} -cgi 0 -C (the whole card as one instance), or nvidia-smi -i {empty[0]} -mig 0",
                fault=True,
            )
        built = tuple(int(part) for part in re.findall(r"\d+", sight.torch_cuda or "")[:2])
        if driver.cuda is not None and built and driver.cuda[0] < built[0]:
            return Unseen(
                f"the driver {driver.version or ''} runs CUDA {driver.cuda[0]}.{driver.cuda[1]} at most, and this torch "
                f"({sight.torch_version}) is built for CUDA {sight.torch_cuda}",
                torch_for(driver),
                fault=True,
            )
    elif "mismatch" in driver.lower():
        return Unseen(
            "the driver in the kernel and the library of it that is installed are of two versions",
            "restart the machine, or the container from the host",
            fault=True,
        )
    told = sight.torch_error or "torch finds no device"
    return Unseen(
        f"there is {cards_told(driver)}, but CUDA does not start: {told}", "nvidia-smi; restart the pod", fault=True
    )


def _torch_error() -> str:
    """What torch says when it starts CUDA, without the stop at its end; an empty text where it starts."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except Exception as error:
        text = " ".join(str(error).split())
        # What follows is advice for those who build torch
        said = re.split(r"(?<=[.)]) (?:Please|Either|Alternatively|Did you)", text)[0][:300]
        return said.rstrip(".") or type(error).__name__
    return ""


def _host_driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    version = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", text)
    return version[1] if version else "of an unknown version"

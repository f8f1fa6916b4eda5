"""Owns the snapshot of the machine that decisions are made from: the device, its abilities, the host's limits, versions."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fasttrain.errors import MachineError, RecipeError
from fasttrain.machine.allocator import gpu_room_bytes
from fasttrain.machine.cuda_ipc import reach_each_other
from fasttrain.machine.gpu_sight import look, why_unseen
from fasttrain.machine.limits import cpu_limit, memory_free, shared_memory_free_bytes
from fasttrain.machine.open_files import open_file_limit
from fasttrain.machine.place import ALONE, Place

if TYPE_CHECKING:
    import torch

PACKAGES = ("fasttrain", "torch", "monai", "numpy", "nibabel", "pydantic", "nvidia-ml-py")
GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """What a plan may rely on. GPU values are None on a CPU run.

    `memory_bound` says what leaves no more memory than `memory_free_gib`. `shared_gib` is what /dev/shm has free and `open_files`
    how many descriptors may be open at once; each is None where nothing bounds it. Of `ranks` processes that train together
    `local_ranks` share this host's memory; `cpus` are those of one of them, and `cards_reach` says whether its GPU can read the
    memory of the others' where it lies.
    """

    device: str
    device_name: str
    cpus: int
    memory_free_gib: float
    gpu_uuid: str | None = None
    gpu_gib: float | None = None
    compute_capability: tuple[int, int] | None = None
    cudnn: int | None = None
    memory_bound: str = "the host"
    shared_gib: float | None = None
    open_files: int | None = None
    gpu_free_gib: float | None = None
    ranks: int = 1
    local_ranks: int = 1
    cards_reach: bool = False

    @property
    def on_gpu(self) -> bool:
        """True for a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def torch_device(self) -> torch.device:
        """The device as torch knows it."""
        import torch

        return torch.device(self.device)


def wants_gpu(setting: str) -> bool | None:
    """What `--device` asks for, from its text alone: True, False, or None for `auto`. Raises RecipeError for other text."""
    if setting == "auto":
        return None
    if setting == "cpu":
        return False
    if re.fullmatch(r"cuda(:\d+)?", setting):
        return True
    raise RecipeError(f"--device {setting}: should be auto, cpu, cuda or cuda:N")


def survey(setting: str, seat: Place = ALONE) -> Hardware:
    """Looks at the machine and the device that `--device` names, of several ranks a card each in their order; raises MachineError
    where that device is not there, and RecipeError where one card is named for several ranks.
    """
    import torch

    wanted = wants_gpu(setting)
    if wanted and not seat.alone:
        if ":" in setting:
            raise RecipeError(f"--device {setting}: {seat.ranks} ranks take a card each; say --device cuda")
        setting = f"cuda:{seat.local_rank}"
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted and not there:
        raise MachineError(f"--device {setting}: {why_no_gpu()}; use --device cpu, or mend that first")
    index = int(setting.partition(":")[2] or 0) if wanted else seat.local_rank if there else 0
    if there and wanted is not False and index >= there:
        names = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(there))
        raise MachineError(f"--device {setting}: there is no such device; there are {names}")
    free, bound = memory_free()
    shared = shared_memory_free_bytes()
    host = Hardware(
        device="cpu",
        device_name=_cpu_name(),
        cpus=max(cpu_limit() // seat.local_ranks, 1),
        memory_free_gib=round(free / GIB, 4),
        memory_bound=bound,
        shared_gib=None if shared is None else shared / GIB,
        open_files=open_file_limit(),
        ranks=seat.ranks,
        local_ranks=seat.local_ranks,
    )
    if not there or wanted is False:
        return host
    properties = torch.cuda.get_device_properties(index)
    return replace(
        host,
        device=f"cuda:{index}",
        device_name=properties.name,
        gpu_uuid=str(getattr(properties, "uuid", "")) or None,
        gpu_gib=round(properties.total_memory / GIB, 2),
        compute_capability=(properties.major, properties.minor),
        cudnn=cudnn_of_torch(),
        gpu_free_gib=round(gpu_room_bytes(index) / GIB, 2),
        cards_reach=seat.local_ranks > 1 and reach_each_other(index, min(seat.local_ranks, there)),
    )


def passed_over(setting: str, hardware: Hardware) -> str | None:
    """That `--device auto` came to the CPU though there is a GPU, or one is paid for, and what mends it; else None."""
    if setting != "auto" or hardware.on_gpu:
        return None
    found = why_unseen(look())
    return f"{found.told}; training runs on the CPU (mend: {found.mend})" if found.fault else None


def cudnn_of_torch() -> int | None:
    """The version of cuDNN that torch runs with, as torch counts; None where it has none that it can use."""
    import torch

    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        # What was found is older than what torch was built with
        return None


def environment_record(hardware: Hardware) -> dict[str, Any]:
    """What `environment.json` keeps: machine, versions, and the variables that change results or speed."""
    import torch

    return {
        "hardware": asdict(hardware),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in PACKAGES},
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("CUDA_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "NCCL_", "FASTTRAIN_"))
        },
    }


def why_no_gpu() -> str:
    """Why torch sees no GPU, in a few words, with what mends it."""
    found = why_unseen(look())
    return f"{found.told} ({found.mend})" if found.mend else found.told


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    # Loaded for a run's record alone: the help of a command does not wait for it
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None

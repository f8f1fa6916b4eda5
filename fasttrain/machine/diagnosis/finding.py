"""Owns what one look at the machine gives, and what every look may go by."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Literal

from fasttrain.errors import wants_memory
from fasttrain.machine.cache_folder import cache_folder
from fasttrain.machine.driver import Driver, read_driver
from fasttrain.machine.mounts import in_container
from fasttrain.machine.pod_variables import with_pod_variables

State = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """`name`: what was looked at; `told`: what was found; `mend`: the command or setting that helps, where there is one."""

    name: str
    state: State
    told: str
    mend: str = ""


@dataclass
class Scene:
    """What is looked at: the places of runs and data, what a run will write, and the environment.

    `data`: None where nobody said and no usual place is there; `need`: gives the bytes that a run's checkpoints will take, None
    where they are not known.
    """

    runs: Path = Path("runs")
    data: Path | None = None
    need: Callable[[], int] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: with_pod_variables(os.environ))

    @cached_property
    def driver(self) -> Driver | str:
        """What NVML told when it was first asked, which is before this process holds memory of a GPU."""
        return read_driver()

    @cached_property
    def torch(self) -> ModuleType | str:
        """The module, or why it cannot be loaded."""
        try:
            import torch
        except Exception as error:
            # An ImportError, an OSError of a library that it loads, or whatever else a broken installation raises
            if wants_memory(error):
                raise
            return in_a_line(error)
        return torch

    @cached_property
    def gpus(self) -> int:
        """How many GPUs torch sees; asked after the driver was."""
        _ = self.driver
        if isinstance(self.torch, str):
            return 0
        with warnings.catch_warnings():
            # Why CUDA does not start is a finding of its own
            warnings.simplefilter("ignore")
            return int(self.torch.cuda.device_count()) if self.torch.cuda.is_available() else 0

    @cached_property
    def container(self) -> bool:
        """Whether this is a container."""
        return in_container(self.environ)

    @cached_property
    def cache(self) -> Path:
        """Where caches lie."""
        return cache_folder(self.environ, self.runs)[0]


def failure_of(work: Callable[[], bool]) -> str | None:
    """Why `work` failed or, where it gave False, that it was wrong; None where all is well."""
    try:
        return None if work() else "the result is wrong"
    except Exception as error:
        return in_a_line(error)


def in_a_line(error: BaseException) -> str:
    """An error's text in one line, and its type where it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__

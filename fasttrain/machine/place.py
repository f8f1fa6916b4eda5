"""Owns where a process stands among those that train a run together, as torch's launcher tells it by the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fasttrain.errors import MachineError

T = TypeVar("T")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """`rank` of `ranks` processes in all, and `local_rank` of the `local_ranks` on this machine, all from 0.

    restarts: how often the launcher has begun them anew.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    restarts: int = 0

    @property
    def leads(self) -> bool:
        """Rank 0, which alone writes, decides and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.ranks == 1

    def share_of(self, items: Sequence[T]) -> list[T]:
        """The items that are this rank's when all are dealt out in turn; none where there are fewer than ranks."""
        return list(items[self.rank :: self.ranks])


ALONE = Place()
_OF_LAUNCHERS = (
    *_NAMES,
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a command of the user's own, which is no rank of the run."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_LAUNCHERS and not name.startswith(("TORCHELASTIC_", "FASTTRAIN_LAUNCHER"))
    }


def place(environ: Mapping[str, str]) -> Place:
    """What `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE` say; without them the process is alone.

    Raises MachineError where some are missing or are no places.
    """
    given = {name: environ[name] for name in _NAMES if environ.get(name, "").strip()}
    if not ("RANK" in given and "WORLD_SIZE" in given):
        # One of them alone may be another program's, as SLURM's or a shell's
        return ALONE
    missing = [name for name in _NAMES if name not in given]
    if missing and given["WORLD_SIZE"].strip() == "1":
        # As an operator of Kubernetes sets them for a single pod
        return ALONE
    if missing:
        raise MachineError(
            f"RANK {given['RANK']} of WORLD_SIZE {given['WORLD_SIZE']} is set without {' and '.join(missing)}; start the ranks "
            "by `torchrun … -m fasttrain train …` or `fasttrain train --gpus N`, which set all"
        )
    wrong = [f"{name} {value}" for name, value in given.items() if not value.strip().isdecimal()]
    if wrong:
        raise MachineError(f"{', '.join(wrong)}: should be whole numbers from 0")
    rank, ranks, local, locals_ = (int(given[name]) for name in _NAMES)
    if rank >= ranks or local >= locals_ or locals_ > ranks:
        raise MachineError(
            f"RANK {rank} of WORLD_SIZE {ranks}, LOCAL_RANK {local} of LOCAL_WORLD_SIZE {locals_}: no such place among the ranks"
        )
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, ranks, local, locals_, int(restarts) if restarts.isdecimal() else 0)

"""Owns which sets can be fetched, and from where: addresses and checksums are MONAI's own table."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.data.location import DECATHLON_TASKS
from fasttrain.errors import MachineError, RecipeError
from fasttrain.recipe.names import did_you_mean

LICENCE = "Medical Segmentation Decathlon, CC BY-SA 4.0, http://medicaldecathlon.com"

_ROUGH_MB = {"spleen": 1600, "hippocampus": 29, "heart": 435, "brain-tumor": 7100}


@dataclass(frozen=True)
class KnownSet:
    """A set of the Decathlon; `rough_bytes` is the archive's size to within a few percent, for servers that do not tell it."""

    name: str
    task: str
    rough_bytes: int


def known_set(name: str) -> KnownSet:
    """The set of that name; RecipeError with the nearest names for any other."""
    task = DECATHLON_TASKS.get(name)
    if task is None:
        raise RecipeError(f"there is no data set {name!r} to fetch{did_you_mean(name, DECATHLON_TASKS)}")
    return KnownSet(name, task, _ROUGH_MB[name] * 1_000_000)


def table_entry(task: str) -> tuple[str, str]:
    """(address, MD5 in lower-case hex) of a task in `monai.apps.DecathlonDataset`; imports torch, which takes seconds."""
    from monai.apps.datasets import DecathlonDataset

    try:
        return DecathlonDataset.resource[task], DecathlonDataset.md5[task].lower()
    except (AttributeError, KeyError) as error:
        raise MachineError(
            f"the installed MONAI has no address and checksum of {task} in monai.apps.DecathlonDataset; "
            "install monai>=1.6, or give both with --from and --md5"
        ) from error

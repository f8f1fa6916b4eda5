"""Owns that the ranks of a run are of one mind before they train: the same versions everywhere, and the same cases."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Mapping

from fasttrain import __version__
from fasttrain.errors import DataError, MachineError
from fasttrain.machine.ranks import Ranks
from fasttrain.wording import counted

_PACKAGES = ("torch", "monai")
"""Whose versions decide what a step computes and how volumes are prepared."""
_MOST_NAMED = 3


def own_versions() -> dict[str, str]:
    """Name → version, of fasttrain and what it computes with."""
    found = {"fasttrain": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def check_versions(ranks: Ranks) -> None:
    """Raises MachineError, the same one in every rank, where a rank runs another version of something than the first."""
    every = ranks.gather((socket.gethostname(), own_versions()))
    first_host, first = every[0]
    for rank, (host, versions) in enumerate(every):
        if differing := [name for name in first if versions.get(name) != first[name]]:
            told = ", ".join(f"{name} {versions.get(name, 'none')} instead of {first[name]}" for name in differing)
            raise MachineError(
                f"rank {rank} on {host} runs {told}, as rank 0 on {first_host} does: ranks of different versions would train "
                "apart; install the same ones"
            )


def check_cases(rank: int, theirs: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises DataError where cases of a rank hold other voxels than on the first.

    theirs, own: {case name: digest}, of the first rank and of this one; what this one has not read is not compared.
    """
    differing = [name for name, digest in own.items() if theirs.get(name, digest) != digest]
    if not differing:
        return
    name, more = differing[0], ", ".join(differing[1:_MOST_NAMED])
    others = f" ({more}{' …' if len(differing) > _MOST_NAMED else ''} too)" if more else ""
    hold = "holds" if len(differing) == 1 else "hold"
    where = f"rank {rank} on {socket.gethostname()}"
    raise DataError(
        f"{where}: {counted(len(differing), 'case')} of {len(own)} {hold} other voxels than on rank 0: {name} has the digest "
        f"{own[name][:12]} instead of {theirs[name][:12]}{others}; bring the same set there, or name its folder with --data"
    )

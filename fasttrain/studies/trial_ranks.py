"""Owns the ranks of one trial: how its processes meet, what the first tells the others, and how their figures become one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from statistics import fmean
from typing import Any, cast

from fasttrain.data.outcomes import one_outcome
from fasttrain.errors import FasttrainError
from fasttrain.machine.place import Place
from fasttrain.machine.rank_watch import RankWatch, is_of_others
from fasttrain.machine.ranks import ONLY_ONE, Joined, Ranks, begin_group

HERE = "127.0.0.1"
_TO_MEET = timedelta(seconds=300)
"""The processes of a trial begin in the same moment; on a GPU each has CUDA to wake up."""
_FOR_ANOTHER_SECONDS = 20.0
"""For the rank to end whose failure this one only notices; the server then ends all."""
_FOR_THE_FIRST_SECONDS = 3.0
_KEPT: list[BaseException] = []
_OF_MEMORY = ("allocated_bytes", "reserved_bytes", "first_reserved_bytes", "free_bytes")


class Seat:
    """Which process of a trial this is. port: where the first one's store listens, door: the descriptor of that socket."""

    def __init__(self, rank: int = 0, ranks: int = 1, port: int = 0, door: int = -1) -> None:
        self.port = port
        self.door = door
        self.place = Place(rank, ranks, rank, ranks)

    def words(self) -> list[str]:
        """For a command line."""
        return [str(one) for one in (self.place.rank, self.place.ranks, self.port, self.door)]


class _EndedByServer:
    """In place of a watch: the server that forked all ranks ends them all with the first that fails or dies."""

    failure: FasttrainError | None = None

    def explain(self, error: BaseException) -> None:
        return

    def ended_by(self, end: Callable[[FasttrainError], object]) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None: ...


def join(seat: Seat, setting: str) -> Ranks:
    """Meets the other ranks of the trial, by a store of its own on this machine; `setting`: as `--device`."""
    place = seat.place
    if place.alone:
        return ONLY_ONE
    import torch
    import torch.distributed as dist

    from fasttrain.machine.hardware import survey

    device = survey(setting, place).torch_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "lo" in [name for _, name in socket.if_nameindex()]:
        # A container's own name may lead nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    door = seat.door if place.leads else None
    store = dist.TCPStore(
        HERE, seat.port, place.ranks, place.leads, _TO_MEET, wait_for_workers=False, master_listen_fd=door
    )
    begin_group(place, store, device)
    return Joined(place, store, cast(RankWatch, _EndedByServer()))


def leave_word_to_another(error: BaseException, known: BaseException, place: Place, memory: bool) -> None:
    """Waits to be ended where the error is another rank's and merely noticed here: the row should name the one whose it is.

    What all ranks raise alike, such as a faulty case, is the first one's to tell.
    """
    if place.alone:
        return
    # What it refers to is not taken apart: a device whose work waits for another rank answers no more
    _KEPT.append(error)
    if _raised_for_another(error) or (not memory and is_of_others(error)):
        time.sleep(_FOR_ANOTHER_SECONDS)
    elif not memory and not place.leads and isinstance(known, FasttrainError):
        time.sleep(_FOR_THE_FIRST_SECONDS)


def _raised_for_another(error: BaseException) -> bool:
    """Whether it came by way of `one_outcome` from another rank: then nothing below raised it here."""
    below = error.__traceback__
    while below is not None and below.tb_next is not None:
        below = below.tb_next
    return below is not None and below.tb_frame.f_code is one_outcome.__code__


def of_all(ranks: Ranks, found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a trial by those of its ranks: the memory of the fullest, the longest wait, the warnings of all. Rates
    are of all together in each.
    """
    every = ranks.gather({key: found.get(key) for key in (*_OF_MEMORY, *_OF_EACH)})
    if len(every) == 1:
        return dict(found)
    both: dict[str, Any] = dict(found)
    if found.get("reserved_bytes") is not None:
        left = [one["free_bytes"] - one["reserved_bytes"] for one in every]
        fullest = left.index(min(left))
        both.update({key: every[fullest][key] for key in _OF_MEMORY if every[fullest][key] is not None})
        both["fullest_rank"], both["reserved_by_rank"] = fullest, [one["reserved_bytes"] for one in every]
    for key, of in _OF_EACH.items():
        values = [one[key] for one in every if one[key] is not None]
        if values:
            both[key] = of(values)
    return both


def _together(lists: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(text for one in lists for text in one))


_OF_EACH: dict[str, Callable[[list[Any]], Any]] = {
    "wait_share": max,
    "utilisation": fmean,
    "retries": sum,
    "host_bytes": max,
    "warnings": _together,
}

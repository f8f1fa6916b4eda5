"""Owns a set that the cards of one machine hold in parts: who holds which case, and memory that all of them read where it lies.

Every rank cuts its patches straight out of the other cards' memory, which nobody writes once it is filled: nothing is exchanged,
and no rank waits for another. On a CPU the same is done with memory that the ranks share.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttrain.data.handed_over import Offer, mapped_bytes
from fasttrain.kernels.patches import Parts
from fasttrain.machine.cuda_ipc import CudaPiece, close_piece, open_piece
from fasttrain.machine.ranks import Ranks

_MOST_SECONDS_FOR_OTHERS = 5.0


class Rooms:
    """Who takes which case, in voxels: one `room` a rank. All ranks that are asked for the same cases in the same order agree."""

    def __init__(self, rooms: Sequence[int], own: int = 0) -> None:
        self.own = own
        self.rooms = tuple(rooms)
        self._used = [0] * len(self.rooms)

    @property
    def used(self) -> int:
        """Of the own one."""
        return self._used[self.own]

    def place(self, voxels: int) -> tuple[int, int] | None:
        """The rank with most room left and the first voxel there; None where none has enough."""
        left, rank = max(
            (room - used, -rank) for rank, (room, used) in enumerate(zip(self.rooms, self._used, strict=True))
        )
        if left < voxels:
            return None
        first = self._used[-rank]
        self._used[-rank] += voxels
        return -rank, first


@dataclass(frozen=True)
class _Offered:
    """What a rank tells of its memory: how many voxels of cases it has room for, its images and its labels."""

    room: int
    images: Any
    labels: Any


@dataclass(frozen=True)
class _Seen:
    """Another process's piece: where it lies, and its values where torch may see them."""

    address: int
    values: Tensor | None


class Piece:
    """Memory of `device` for `count` values of a type, that other ranks can reach; raises torch.OutOfMemoryError, and OSError
    where it cannot be shared.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        size = max(count, 1) * dtype.itemsize
        self._cuda: CudaPiece | None = None
        self._memory: int | None = None
        self.offer: Any
        if device.type == "cuda":
            self._cuda = CudaPiece(size, device)
            self.offer, self.values = self._cuda.handle, self._cuda.values.view(dtype)
            return
        self._memory = os.memfd_create("fasttrain")
        os.ftruncate(self._memory, size)
        self.offer, self.values = Offer.of(self._memory), mapped_bytes(os.dup(self._memory)).view(dtype)

    def offered(self) -> None:
        """All have reached it, or never will."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def free(self) -> None:
        """Nobody reads it any more."""
        self.offered()
        if self._cuda is not None:
            self._cuda.free()
            self._cuda = None


class Shards:
    """The memory of all ranks of a machine, once each has reached the others'."""

    def __init__(
        self, ranks: Ranks, rooms: Sequence[int], own: tuple[Piece, Piece], seen: list[tuple[_Seen, _Seen]]
    ) -> None:
        self.rooms = Rooms(rooms, ranks.place.local_rank)
        self._own = own
        self._seen = seen
        self._over = _Flags(ranks)

    @property
    def count(self) -> int:
        """Ranks that hold a part each."""
        return len(self.rooms.rooms)

    def parts(self, owners: Sequence[int], device: torch.device) -> Parts:
        """How the volumes of these owners are found from here."""
        images, labels = self._own[0].values, self._own[1].values
        at = [(one.address, other.address) for one, other in self._seen]
        at[self.rooms.own] = images.data_ptr(), labels.data_ptr()

        def distances(number: int, base: Tensor) -> Tensor:
            return torch.tensor(
                [(at[owner][number] - base.data_ptr()) // base.element_size() for owner in owners], device=device
            )

        memories = [
            None
            if image.values is None or label.values is None
            else (image.values.view(images.dtype), label.values.view(labels.dtype))
            for image, label in self._seen
        ]
        memories[self.rooms.own] = images, labels
        return Parts(tuple(owners), tuple(memories), distances(0, images), distances(1, labels))

    def close(self) -> None:
        """Gives up the others' memory, and the own once they have given it up, for which it waits a little: where one of them has
        ended in another way, the system takes it back with this process.
        """
        if not self._seen:
            return
        images = self._own[0].values
        if images.is_cuda:
            # A GPU that failed answers no more
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(images.device)
        _give_up(self._seen)
        self._seen = []
        if self._over.all_said(_MOST_SECONDS_FOR_OTHERS if images.is_cuda else 0.0):
            _free(self._own)


def reach(ranks: Ranks, room: int, own: tuple[Piece, Piece] | str, device: torch.device) -> Shards | str:
    """The shards of all ranks of the machine, called by all of them; why there are none, told by all alike, where one could not
    share its memory (`own` says why then) or could not reach another's. What is its own is given up then.
    """
    offered = None if isinstance(own, str) else _Offered(room, own[0].offer, own[1].offer)
    words = ranks.gather_on_host(offered)
    seen: list[tuple[_Seen, _Seen]] = []
    why = own if isinstance(own, str) else None
    try:
        for rank, word in enumerate(words):
            if why is None and word is None:
                why = "another rank cannot share its memory"
            if why is None:
                mine = rank == ranks.place.local_rank
                seen.append(
                    (_Seen(0, None), _Seen(0, None)) if mine else (_see(word.images, device), _see(word.labels, device))
                )
    except (OSError, RuntimeError) as error:
        why = str(error)
    whys = ranks.gather_on_host(why)
    pieces = () if isinstance(own, str) else own
    for piece in pieces:
        piece.offered()
    if not isinstance(own, str) and not any(whys):
        return Shards(ranks, [word.room for word in words], own, seen)
    _give_up(seen)
    # Nobody frees what another still has open
    ranks.gather_on_host(None)
    _free(pieces)
    return next(one for one in whys if one is not None)


def _see(offer: Any, device: torch.device) -> _Seen:
    if isinstance(offer, Offer):
        values = offer.values()
        return _Seen(values.data_ptr(), values)
    return _Seen(open_piece(offer, device), None)


def _give_up(seen: Sequence[tuple[_Seen, _Seen]]) -> None:
    for one in (one for pair in seen for one in pair):
        if one.values is None and one.address:
            with contextlib.suppress(OSError):
                close_piece(one.address)


def _free(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        with contextlib.suppress(OSError):
            piece.free()


class _Flags:
    """A byte a rank, in memory that all of a machine see, by which each says that it is over with something."""

    def __init__(self, ranks: Ranks) -> None:
        place = ranks.place
        first = Piece(place.local_ranks, torch.uint8, torch.device("cpu")) if place.local_rank == 0 else None
        offer = ranks.gather_on_host(None if first is None else first.offer)[0]
        self._said = offer.values()
        ranks.gather_on_host(None)
        if first is not None:
            first.offered()
        self._own = place.local_rank

    def all_said(self, most_seconds: float) -> bool:
        """Says it, and whether all have within so many seconds."""
        self._said[self._own] = 1
        until = time.monotonic() + most_seconds
        while not bool(self._said.all()) and time.monotonic() < until:
            time.sleep(0.01)
        return bool(self._said.all())

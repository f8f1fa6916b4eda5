"""Owns where the ranks of a run find each other: torch's key-value store, and who is missing there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from fasttrain.errors import LostRankError, MachineError
from fasttrain.machine.patience import within
from fasttrain.machine.place import Place

if TYPE_CHECKING:
    from torch.distributed import Store

_TO_ANSWER_SECONDS = 25.0
"""For what listens at the port to answer as a store does."""
_TELL_AFTER_SECONDS = 20.0
_TO_LISTEN_SECONDS = 60.0
"""Ranks that are started by hand may begin at different times, and load torch first."""
_TO_COME_SECONDS = 600.0
_TO_COME_TOGETHER_SECONDS = 30.0
"""Where a launcher began all on one machine at once, whose memory holds what they load: one that is later stands still."""
_TO_LET_SPEAK_SECONDS = 2.0
"""For the first of those that are there: one sentence is enough, and the launcher ends the others."""
_POLL_SECONDS = 0.2


def meet(place: Place, tell: Callable[[str], None] = lambda sentence: None) -> Store:
    """The store of this start of the ranks, once all are there. tell: hears who is waited for after 20 s.

    Raises MachineError with what is in the way: a port that is taken, an address where nothing listens, ranks that do not come;
    LostRankError where they were begun with this one and stand still.
    """
    from torch.distributed import PrefixStore

    host, port = _address()
    shared = PrefixStore(f"fasttrain/{place.restarts}", _store(place, host, port, tell))
    try:
        _wait_for_all(place, shared, tell)
    except RuntimeError as error:
        raise MachineError(_lost(place, host, port, error)) from error
    return shared


def _address() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", "").strip(), os.environ.get("MASTER_PORT", "").strip()
    if not host or not port:
        raise MachineError(
            "MASTER_ADDR and MASTER_PORT are not both set: where rank 0 is to be met; `torchrun … -m fasttrain train …` sets them"
        )
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise MachineError(f"MASTER_PORT {port}: should be a port from 1 to 65535, such as 29500")
    return host, int(port)


def _store(place: Place, host: str, port: int, tell: Callable[[str], None]) -> Store:
    """That of the launcher where it has one, else one that the first rank keeps."""
    from torch.distributed import TCPStore

    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = place.leads and not of_launcher
    if not keeps:
        _wait_for_door(place, host, port, tell)

    def connected() -> Store:
        return TCPStore(
            host,
            port,
            place.ranks,
            keeps,
            timeout=timedelta(seconds=_TO_ANSWER_SECONDS),
            wait_for_workers=False,
            multi_tenant=keeps,
        )

    try:
        return within(_TO_ANSWER_SECONDS, connected)
    except (RuntimeError, TimeoutError, ValueError) as error:
        if keeps:
            raise MachineError(_taken(port, error)) from error
        raise MachineError(
            f"rank {place.rank}: what listens at {host}:{port} (MASTER_ADDR, MASTER_PORT) does not answer as rank 0 does: the "
            "port is another program's; give all ranks another MASTER_PORT"
        ) from error


def _taken(port: int, error: Exception) -> str:
    if "EADDRINUSE" not in str(error) and "address already in use" not in str(error):
        return f"rank 0 cannot listen at port {port} (MASTER_PORT): {' '.join(str(error).split())[:200]}"
    return (
        f"MASTER_PORT {port} is taken by another program on {socket.gethostname()} (`ss -ltnp` names it); give all ranks "
        f"another, such as {_free_port()}"
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def _wait_for_door(place: Place, host: str, port: int, tell: Callable[[str], None]) -> None:
    """Until something listens there."""
    began, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((host, port), timeout=_TELL_AFTER_SECONDS / 4).close()
            return
        except OSError as error:
            waited, why = time.monotonic() - began, error.strerror or str(error)
        what = f"rank {place.rank} cannot reach rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT): {why.lower()}"
        if waited > _TO_LISTEN_SECONDS:
            raise MachineError(f"{what}, for {waited:.0f} s; start rank 0 there, or name where it is")
        if waited > _TELL_AFTER_SECONDS and not told:
            told = True
            tell(f"{what}; trying again for {_TO_LISTEN_SECONDS - waited:.0f} s")
        time.sleep(_POLL_SECONDS)


def _wait_for_all(place: Place, store: Store, tell: Callable[[str], None]) -> None:
    began, told, all_there = time.monotonic(), False, "all"
    together = place.local_ranks == place.ranks and "TORCHELASTIC_RUN_ID" in os.environ
    most = _TO_COME_TOGETHER_SECONDS if together else _TO_COME_SECONDS
    store.set(f"here/{place.rank}", socket.gethostname())
    missing = list(range(place.ranks))
    while True:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if place.leads and not missing:
            store.set(all_there, "")
            return
        if not place.leads and store.check([all_there]):
            return
        waited = time.monotonic() - began
        # The first one alone may be late with its word that all are there
        named = f"rank {', '.join(map(str, missing[:8])) or 0}{' …' if len(missing) > 8 else ''}"
        speaks = place.rank == min(set(range(place.ranks)) - set(missing))
        if waited > most + (0 if speaks else _TO_LET_SPEAK_SECONDS):
            if not together:
                raise MachineError(
                    f"{named} of {place.ranks} did not come within {waited:.0f} s; start all of them, with one WORLD_SIZE"
                )
            lost = LostRankError(
                f"{named} of {place.ranks} did not come within {waited:.0f} s of the others: its process is frozen, or waits "
                "for a disk or a driver"
            )
            lost.silent = True
            raise lost
        if waited > _TELL_AFTER_SECONDS and not told and place.leads:
            told = True
            tell(f"waiting for {named} of {place.ranks} to come, for at most {most:.0f} s")
        time.sleep(_POLL_SECONDS)


def _lost(place: Place, host: str, port: int, error: Exception) -> str:
    told = " ".join(str(error).split())[:200]
    return (
        f"rank {place.rank} lost the others at {host}:{port} (MASTER_ADDR, MASTER_PORT) before all were there: {told}"
    )

"""Owns how the processes that train a run together speak: values from the first to all, from each to all, sums of tensors."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from fasttrain.errors import FasttrainError, MachineError
from fasttrain.machine.meeting import meet
from fasttrain.machine.place import ALONE, Place
from fasttrain.machine.rank_watch import RankWatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store, Work

_A_DAY = timedelta(days=1)
"""Of a collective: ranks wait for one that validates a large case or compiles. That one is lost is found by `rank_watch`."""


class Ranks(Protocol):
    """The ranks of a run, seen from one of them. Every method is called by all, in the same order."""

    @property
    def place(self) -> Place: ...

    def share(self, value: Any) -> Any:
        """Rank 0's value; what the others give is not looked at. Plain values, small tensors."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        ...

    def gather_on_host(self, value: Any) -> list[Any]:
        """The values of the ranks on this machine, by local rank."""
        ...

    def begin_any(self, flag: bool) -> Callable[[], bool]:
        """Whether any rank's flag is set, which the function that is returned waits for."""
        ...

    def explain(self, error: BaseException) -> FasttrainError | None:
        """The sentence for an error of torch's that says no more than that another rank is gone; None for any other."""
        ...

    def ended_by(self, end: Callable[[FasttrainError], object]) -> AbstractContextManager[None]:
        """A scope of a run that another rank's failure ends: `end` is called then, from a thread, before the process ends."""
        ...


class OnlyOne:
    """A run of one process: nothing is sent anywhere."""

    place = ALONE

    def share(self, value: Any) -> Any:
        """The value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]

    def gather_on_host(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]

    def begin_any(self, flag: bool) -> Callable[[], bool]:
        """The flag."""
        return lambda: flag

    def explain(self, error: BaseException) -> None:
        """There is no other."""
        return

    def ended_by(self, end: Callable[[FasttrainError], object]) -> AbstractContextManager[None]:
        """There is no other."""
        return contextlib.nullcontext()


ONLY_ONE = OnlyOne()


class Joined:
    """The ranks of torch's default process group. Values travel by gloo, on the CPU, beside a GPU's work.

    store: the launcher's key-value store, for what can't wait for all ranks. watch: who of them failed or is gone.
    """

    def __init__(self, place: Place, store: Store, watch: RankWatch) -> None:
        import torch.distributed as dist

        self.place = place
        self.store = store
        self.watch = watch
        self._control: ProcessGroup = dist.new_group(backend="gloo", timeout=_A_DAY)
        self._host = self._of_host()

    def share(self, value: Any) -> Any:
        """Rank 0's value, pickled on its way, which never leaves the run's own processes."""
        import torch.distributed as dist

        values = [value if self.place.leads else None]
        dist.broadcast_object_list(values, 0, self._control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.place.ranks
        dist.all_gather_object(values, value, self._control)
        return values

    def gather_on_host(self, value: Any) -> list[Any]:
        """The values of the ranks on this machine, by local rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.place.local_ranks
        dist.all_gather_object(values, value, self._host)
        return values

    def begin_any(self, flag: bool) -> Callable[[], bool]:
        """Begins a sum over all ranks that costs the caller nothing until it waits for it."""
        import torch
        import torch.distributed as dist

        found = torch.tensor(int(flag))
        work: Work | None = dist.all_reduce(found, group=self._control, async_op=True)

        def ended() -> bool:
            if work is not None:
                work.wait()
            return bool(found)

        return ended

    def explain(self, error: BaseException) -> FasttrainError | None:
        """Who is gone, where something sent to or from other ranks broke off."""
        return self.watch.explain(error)

    def ended_by(self, end: Callable[[FasttrainError], object]) -> AbstractContextManager[None]:
        """A scope in which `end` writes down that another rank's failure has ended the run, from any thread."""
        return self.watch.ended_by(end)

    def close(self) -> None:
        """Leaves the group; a rank that is gone already is no reason to wait."""
        import torch.distributed as dist

        self.watch.close()
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()

    def _of_host(self) -> ProcessGroup:
        import torch.distributed as dist

        hosts = self.gather((os.environ.get("GROUP_RANK", ""), socket.gethostname()))
        own: ProcessGroup | None = None
        for host in dict.fromkeys(hosts):
            members = [rank for rank, other in enumerate(hosts) if other == host]
            group = dist.new_group(members, backend="gloo", timeout=_A_DAY)
            if self.place.rank in members:
                own = group
        assert own is not None
        return own


def begin_group(place: Place, store: Store, device: torch.device) -> None:
    """Makes torch's default process group of the ranks that meet at `store`: gloo, and NCCL beside it for what lies on a GPU."""
    import torch.distributed as dist

    # A lost rank is found, and told, by whoever watches over the ranks; torch's own answer is to abort the others
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.ranks,
        timeout=_A_DAY,
        device_id=device if on_gpu else None,
    )


def join(
    place: Place,
    device: torch.device,
    on_failure: Callable[[FasttrainError], None] | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Joined:
    """Meets the other ranks; on a GPU sums of tensors on it go by NCCL. on_failure: as `RankWatch` has it; tell: hears who is
    waited for. Raises MachineError where they cannot be met.
    """
    store = meet(place, tell)
    watch: RankWatch | None = None
    try:
        watch = RankWatch(place, store, on_failure)
        begin_group(place, store, device)
        return Joined(place, store, watch)
    except (RuntimeError, ValueError) as error:
        known = watch.explain(error) if watch is not None else None
        if known is not None:
            raise known from error
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        told = " ".join(str(error).split())[:300]
        raise MachineError(
            f"the {place.ranks} ranks could not meet at {where} (MASTER_ADDR, MASTER_PORT): {told}"
        ) from error

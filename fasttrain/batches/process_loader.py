"""Owns worker processes: how they begin, what they do with signals and with too little shared memory, and how they end."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.queues
import os
import re
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from fasttrain.batches.thread_loader import NothingYet
from fasttrain.batches.whereabouts import begin_as
from fasttrain.batches.worker_watch import LOST_BATCH
from fasttrain.errors import MachineError
from fasttrain.own_process import end_with_parent

_TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SECONDS_TO_END = 10.0
_TIMED_OUT = "DataLoader timed out"
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_FILE = re.compile(r"</(torch_\w+)>")


class ProcessLoader(Iterator[Any]):
    """Items `dataset[key]` for each of `keys` in order, by torch's DataLoader: by `workers` processes, or by this one for 0.

    Raises NothingYet after `wait_seconds` without the next item, MachineError where the processes cannot be started.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        keys: Iterable[int],
        workers: int,
        prefetch_factor: int,
        pin: bool,
        wait_seconds: float,
    ) -> None:
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            prefetch_factor=prefetch_factor if workers else None,
            pin_memory=pin,
            timeout=wait_seconds if workers else 0,
            worker_init_fn=_begin_worker if workers else None,
            # torch's own would make tensors of arrays, each of which goes through shared memory and needs a descriptor
            collate_fn=_as_it_is,
            # Without one of its own a loader draws its base seed from torch's generator, and so a resume, which makes a new
            # loader, would shift every dropout after it.
            generator=torch.Generator(),
        )
        others = set(multiprocessing.active_children())
        # Blocked while workers are forked, so that a signal to the group can't end one that has not yet learnt to ignore it
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
        try:
            self._items: Any = iter(loader)
        except OSError as error:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
                process.join()
            raise MachineError(
                f"{workers} worker processes cannot be started ({error.strerror or error}); set data.worker_kind: thread or "
                "data.workers: 0, or raise the limit on open files (`ulimit -n`) or processes (`ulimit -u`)"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    @property
    def processes(self) -> list[BaseProcess]:
        """The workers, by number."""
        return list(getattr(self._items, "_workers", ()))

    def __next__(self) -> Any:
        try:
            return next(self._items)
        except RuntimeError as error:
            if str(error).startswith(_TIMED_OUT):
                # Its state is as before: the same item can be asked for again
                raise NothingYet from None
            raise

    @property
    def pins_no_more(self) -> bool:
        """Whether the thread that pins batches has ended, so that none will come."""
        thread = getattr(self._items, "_pin_memory_thread", None)
        return thread is not None and not thread.is_alive()

    def close(self, broken: bool) -> None:
        """Ends the workers. `broken`: one of them died or hangs, and may hold for ever what an orderly end would wait for."""
        if not hasattr(self._items, "_shutdown_workers"):
            return
        if not broken and not any(map(_is_stopped, self.processes)):
            # A worker that dies now is one that was to end
            with contextlib.suppress(RuntimeError):
                self._items._shutdown_workers()
        self._kill_workers()

    def _kill_workers(self) -> None:
        """SIGKILL ends a process that is stopped or ignores signals too; after an orderly end there is none left."""
        items = self._items
        if items._worker_pids_set:
            _remove_worker_pids(id(items))
            items._worker_pids_set = False
        orderly, items._shutdown = items._shutdown, True
        left = [process for process in items._workers if process.is_alive()]
        for process in left:
            process.kill()
        for process in items._workers:
            process.join(_SECONDS_TO_END)
        if orderly and not left:
            return
        for process in items._workers:
            # One killed between making such a file and taking its name away leaves it, and its memory, for good
            for file in _SHARED_MEMORY.glob(f"torch_{process.pid}_*"):
                with contextlib.suppress(OSError):
                    file.unlink()
        thread = getattr(items, "_pin_memory_thread", None)
        if thread is not None:
            items._pin_memory_thread_done_event.set()
            thread.join(_SECONDS_TO_END)
        for queue in (*items._index_queues, items._worker_result_queue):
            queue.cancel_join_thread()
            queue.close()


def shared(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tensors lie in shared memory, in a worker process; where that has no room they go through a pipe.

    Shared here and not when the message is sent: a thread sends it, which would drop what it cannot send, and the trainer would
    wait for ever.
    """
    if torch.utils.data.get_worker_info() is None:
        return message
    tensors = {key: value for key, value in message.items() if isinstance(value, torch.Tensor)}
    try:
        for tensor in tensors.values():
            tensor.share_memory_()
    except (OSError, RuntimeError) as error:
        _remove_what_is_left(str(error))
        copies = {key: tensor.numpy() for key, tensor in tensors.items()}
        return {**message, **copies, "by_pipe": " ".join(str(error).split())}
    return message


def _remove_what_is_left(error: str) -> None:
    """torch leaves the empty file for which it found no room, and names it."""
    if (name := _SHARED_FILE.search(error)) is not None:
        with contextlib.suppress(OSError):
            (_SHARED_MEMORY / name[1]).unlink()


def _as_it_is(message: Any) -> Any:
    return message


def _is_stopped(process: BaseProcess) -> bool:
    try:
        return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _begin_worker(number: int) -> None:
    # A signal to the process group is the trainer's to answer: it saves, then ends its workers.
    for one in _TRAINERS_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TRAINERS_SIGNALS)
    # Elsewhere than on Linux torch's own watchdog does it, which needs seconds
    end_with_parent()
    begin_as(number)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_for_a_lost_batch)  # type: ignore[attr-defined]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _end_for_a_lost_batch(_error: BaseException, _message: Any) -> None:
    """In place of the traceback that the sending thread would print before it goes on without the batch."""
    os._exit(LOST_BATCH)

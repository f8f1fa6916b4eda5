"""Runs a function in several processes that stand where torch's launcher would have put them."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_MOST_SECONDS = 120
_FORKS = multiprocessing.get_context("forkserver")
# Imported once, in the process that all ranks are forked from
_FORKS.set_forkserver_preload(["fasttrain.engine.run", "fasttrain.engine.following"])


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What the launcher tells a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def in_ranks(ranks: int, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What `work(joined, *given)` returns in each of so many ranks; whatever one of them raises is raised here."""
    port = free_port()
    ends, processes = [], []
    for rank in range(ranks):
        ours, theirs = _FORKS.Pipe()
        process = _FORKS.Process(target=_rank, args=(theirs, variables(rank, ranks, port), work, given), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        return [_answer(one) for one in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(end: Connection) -> Any:
    if not wait([end], _MOST_SECONDS):
        raise TimeoutError("a rank gave no answer")
    found, value = end.recv()
    if not found:
        raise AssertionError(value)
    return value


def _rank(end: Connection, environ: dict[str, str], work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    os.environ.update(environ)
    import torch

    from fasttrain.machine.place import place
    from fasttrain.machine.ranks import join

    torch.set_num_threads(1)
    try:
        joined = join(place(os.environ), torch.device("cpu"))
        end.send((True, work(joined, *given)))
        joined.close()
    except BaseException:
        end.send((False, traceback.format_exc()))

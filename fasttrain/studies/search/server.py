"""Owns the process that workers are forked from: it has imported torch and fasttrain, and never touches a GPU.

So imports are paid once, and a worker that died of its trial is replaced in a fraction of a second. A line of JSON on stdin asks
for a worker; what became of it is told by a line on stdout. The server ends, with its workers, when its stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from typing import Any

from fasttrain.own_process import end_with_parent

_LOOK_SECONDS = 0.05


def main() -> None:
    """Serves until its stdin ends; is a worker itself where the arguments name a socket and a number."""
    end_with_parent()
    if len(sys.argv) == 3:
        from fasttrain.studies.search.worker import work

        work(sys.argv[1], int(sys.argv[2]))
        return
    _load()
    _answer({"ready": True})
    left, children = b"", set[int]()
    while True:
        _reap(children)
        if not select.select([0], [], [], _LOOK_SECONDS)[0]:
            continue
        piece = os.read(0, 65536)
        if not piece:
            break
        *lines, left = (left + piece).split(b"\n")
        for line in lines:
            children.add(_fork(json.loads(line)))
    for child in children:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)


def _load() -> None:
    """All that a trial would import; none of it may wake a GPU up, since a forked process could not use it then."""
    from fasttrain.engine.preparing import load_for_steps
    from fasttrain.studies.search import worker  # noqa: F401

    load_for_steps()


def _answer(record: dict[str, Any]) -> None:
    os.write(1, json.dumps(record).encode() + b"\n")


def _reap(children: set[int]) -> None:
    while children:
        with contextlib.suppress(ChildProcessError):
            child, code = os.waitpid(-1, os.WNOHANG)
            if child:
                children.discard(child)
                # Its loader workers, where it could not end them itself
                with contextlib.suppress(OSError):
                    os.killpg(child, signal.SIGKILL)
                _answer({"ended": child, "status": os.waitstatus_to_exitcode(code)})
                continue
        return


def _fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if not child:
        _become_worker(request)
    return child


def _become_worker(request: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        end_with_parent()
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for here, there in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(here, there)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import torch

        from fasttrain.studies.search.worker import work

        # Whatever woke CUDA up in the server, the worker need not fail of it
        if torch.cuda._is_in_bad_fork():
            own = "fasttrain.studies.search.server"
            os.execv(sys.executable, [sys.executable, "-m", own, request["socket"], str(request["worker"])])
        work(request["socket"], int(request["worker"]))
        code = 0
    except BaseException:
        import traceback

        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Nothing of the server's is to be closed or flushed twice
        os._exit(code)


if __name__ == "__main__":
    main()

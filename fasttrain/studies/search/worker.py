"""Owns what a worker does: trials one after another, each an ordinary run in its folder, in one process with a warm device.

A trial that fails takes its worker with it: whatever it left behind in the process or on the card is gone before the next one.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from fasttrain.data.caches.shared import share_volumes
from fasttrain.engine.preparing import look, read_start
from fasttrain.engine.resuming.going_on import look_at
from fasttrain.engine.run import RunResult, resume, train
from fasttrain.engine.second_try import free_memory
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import (
    FasttrainError,
    InUseError,
    OutOfMemoryError,
    RecipeError,
    StorageError,
    exit_code_of,
    wants_memory,
)
from fasttrain.machine.cache_folder import own_cache_folder
from fasttrain.machine.compiler import keep_compiled
from fasttrain.machine.threads import limit_threads, probably_on_gpu, thread_count
from fasttrain.recipe import Recipe, ResolvedRecipe
from fasttrain.run_folder import RunFolder
from fasttrain.studies.lock import digest_of, matters
from fasttrain.studies.search.lines import Lines
from fasttrain.studies.search.reporting import Reporter, peak_gib

_LEFT_BYTES = 256 << 20
"""Of a card's memory that a trial may leave behind in its worker."""
_PLANS: dict[str, tuple[dict[str, Any], str]] = {}
"""By the shapes of a step, what the run that had them first was found to do best with, and its device."""
_CLAIM_SECONDS = 10.0
"""For which a process that was killed may still hold a trial's folder."""


def work(place: str, number: int) -> None:
    """Connects to the search and carries out what it sends, until it is told to end or a trial fails."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(place)
    lines = Lines(connection)
    lines.send({"worker": number, "process": os.getpid()})
    tasks: queue.Queue[dict[str, Any] | None] = queue.Queue()
    at_work: list[Reporter] = []

    def listen() -> None:
        while True:
            word = lines.next(None)
            if word is None:
                break
            if "task" in word:
                tasks.put(word["task"])
            elif "end" in word:
                tasks.put(None)
            elif at_work:
                at_work[-1].hear(word)
        if lines.over:
            # The search is gone: nobody would hear of what comes
            os._exit(0)

    threading.Thread(target=listen, name="search", daemon=True).start()
    while (task := tasks.get()) is not None:
        if "look" in task:
            lines.send(_looked(task))
            continue
        stop = StopRequest()
        reporter = Reporter(lines, stop)
        at_work.append(reporter)
        found, sound = carry_out(task, reporter, stop)
        at_work.clear()
        lines.send({"ended": {**found, "retires": not sound}})
        if not sound:
            return


def _looked(task: dict[str, Any]) -> dict[str, Any]:
    """What the data and the machine are, before any trial; what is wrong with them is wrong for all."""
    _prepare(task)
    try:
        recipe, data = Recipe.model_validate_json(task["recipe"]), task["data"]
        looked = look(recipe, None if data is None else Path(data), task["device"])
    except Exception as error:
        traceback.print_exc()
        faults = error.faults if isinstance(error, FasttrainError) else (f"{type(error).__name__}: {error}",)
        return {"looked": None, "faults": list(faults), "exit_code": exit_code_of(error)}
    hardware, sizes = looked.hardware, looked.sizes
    return {
        "looked": {
            "on_gpu": hardware.on_gpu,
            "device": hardware.device,
            "device_name": hardware.device_name,
            "device_gib": hardware.gpu_gib,
            "cpus": hardware.cpus,
            "cache_bytes": sizes.cache_bytes,
            "root": str(looked.root),
        }
    }


def carry_out(task: dict[str, Any], reporter: Reporter, stop: StopRequest) -> tuple[dict[str, Any], bool]:
    """Runs one trial; how it ended, and whether the process is fit for another."""
    began = time.time()
    _prepare(task)
    found: dict[str, Any] = {}
    failure: BaseException | None = None
    try:
        result = _run(task, reporter, stop, began)
        found = {"status": "ended", "summary": _figures(result)}
    except Stopped:
        found = {"status": "stopped"}
    except Exception as error:
        traceback.print_exc()
        failure = error
        memory = isinstance(error, OutOfMemoryError) or wants_memory(error)
        faults = error.faults if isinstance(error, FasttrainError) else (f"{type(error).__name__}: {error}",)
        found = {
            "status": "memory" if memory else "lost" if _is_lost(task, error) else "failed",
            "faults": [" ".join(fault.split()) for fault in faults],
            "exit_code": exit_code_of(error),
        }
    reporter.close()
    spans = {name: list(map(list, some)) for name, some in reporter.spans.items()}
    found |= {"spans": spans, "gib": peak_gib(), "lowered": reporter.lowered, "device": reporter.device, "began": began}
    return found, failure is None and _tidied()


def _prepare(task: dict[str, Any]) -> None:
    if probably_on_gpu(task["device"]):
        keep_compiled(own_cache_folder())
    if task["shares"] is not None:
        share_volumes(Path(task["shares"]))
    limit_threads(task["threads"] or thread_count("auto", probably_on_gpu(task["device"]))[0])
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _run(task: dict[str, Any], reporter: Reporter, stop: StopRequest, began: float) -> RunResult:
    folder, data = RunFolder(Path(task["run"])), None if task["data"] is None else Path(task["data"])
    recipe = Recipe.model_validate_json(task["recipe"])
    if folder.holds_a_run() and not folder.never_trained() and not task["anew"]:
        give_up = time.monotonic() + _CLAIM_SECONDS
        while True:
            try:
                return resume(
                    folder.path, data=data, device=task["device"], observers=[reporter], stop=stop, began=began
                )
            except InUseError:
                # The process that was killed may still be ending
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.2)
    origins = {tuple(keys): origin for keys, origin in task["origins"]}
    resolved = ResolvedRecipe(recipe, origins, task["source"])
    shapes = digest_of(
        matters(
            recipe,
            (),
        )
    )
    result = train(
        resolved,
        data=data,
        run=folder.path,
        device=task["device"],
        observers=[reporter],
        stop=stop,
        began=began,
        former=_PLANS.get(shapes),
    )
    _remember(folder, shapes)
    return result


def _is_lost(task: dict[str, Any], error: BaseException) -> bool:
    """Whether a trial could not go on because its run lacks what that takes, however often it is tried."""
    folder = RunFolder(Path(task["run"]))
    if task["anew"] or not isinstance(error, StorageError | RecipeError):
        return False
    if not folder.holds_a_run():
        return True
    if folder.never_trained() or folder.finished():
        return False
    try:
        look_at(folder)
    except FasttrainError:
        return True
    return False


def _remember(folder: RunFolder, shapes: str) -> None:
    """The plan of this run, so that the next one of the same shapes measures nothing, and computes as this one did."""
    if shapes not in _PLANS:
        start, plan = read_start(folder)
        _PLANS[shapes] = (
            {**plan, "cases": {"training": [], "validation": []}, "skipped_cases": {}},
            start["hardware"]["device_name"],
        )


def _figures(result: RunResult) -> dict[str, Any]:
    summary = result.summary
    kept = ("status", "stopped_by", "best", "seconds", "epochs", "steps", "error")
    return {"exit_code": result.exit_code, **{key: summary.get(key) for key in kept}}


def _tidied() -> bool:
    """Gives back what the trial held; whether that was all of it."""
    free_memory()
    return not torch.cuda.is_initialized() or torch.cuda.memory_allocated() < _LEFT_BYTES

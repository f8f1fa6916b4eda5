"""A search without training: workers that say what they are told to, and studies of a tiny recipe."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.engine.stop import StopRequest
from fasttrain.recipe import ResolvedRecipe, resolve
from fasttrain.studies.search.beginning import Asked, open_study, with_space
from fasttrain.studies.search.lines import Lines
from fasttrain.studies.search.pool import Worker
from fasttrain.studies.search.running import Search, Wanted

Script = Callable[[dict[str, Any]], "list[dict[str, Any]] | None"]
"""Takes a task; gives the words that its worker says, or None where it dies."""
_PART = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from search_parts import MadePool, ended, made_search
def slow(task):
    time.sleep(0.15)
    return [ended()]
pool = MadePool(slow)
search, told = made_search(Path(sys.argv[1]), pool, storage=sys.argv[2], trials=9)
search.run()
print(*(Path(task["run"]).name for task in pool.tasks))
"""
"""One of several processes that share a study: folder, storage, the folder of this file; says which runs it trained."""


def ended(score: float | None = 0.5, **more: Any) -> dict[str, Any]:
    """The last word of a trial."""
    summary = {
        "status": "done",
        "stopped_by": None,
        "best": {"value": score},
        "seconds": {"training": 2.0},
        "epochs": 3,
    }
    found = {
        "status": "ended",
        "summary": {**summary, **more.pop("summary", {})},
        "retires": False,
        "spans": {},
        "gib": 1.0,
    }
    return {"ended": {**found, **more}}


def epoch(number: int, score: float, epochs: int = 6) -> dict[str, Any]:
    """A word after a validation."""
    return {"epoch": number, "epochs": epochs, "score": score, "gib": 1.0}


class MadePool:
    """Gives workers that are threads of this process."""

    def __init__(self, script: Script, status: int = -9) -> None:
        self.script = script
        self.status = status
        self.tasks: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self.workers = 0
        self.logs = Path("nowhere")

    def worker(self) -> Worker:
        """A new one."""
        self.workers += 1
        ours, theirs = socket.socketpair()
        threading.Thread(target=self._serve, args=(Lines(theirs),), daemon=True).start()
        return Worker(Lines(ours), 999_999_999, None)

    def status_of(self, worker: Worker) -> int | None:
        """How it died."""
        return self.status

    def _serve(self, lines: Lines) -> None:
        while not lines.over:
            word = lines.next(1.0)
            if word is None or "task" not in word:
                if word is not None and "end" in word:
                    break
                continue
            self.tasks.append(word["task"])
            said = self.script(word["task"])
            if said is None:
                break
            for one in said:
                lines.send(one)
                if "epoch" in one:
                    self._hear(lines)
        lines.close()

    def _hear(self, lines: Lines) -> None:
        give_up = time.monotonic() + 5.0
        while time.monotonic() < give_up:
            word = lines.next(1.0)
            if word is not None:
                self.heard.append(word)
            if word is not None and "prune" in word:
                return


def recipe_with(**search: Any) -> ResolvedRecipe:
    """The demo, searched over its learning rate, for six epochs."""
    space = {"optimizer.learning_rate": {"kind": "float", "low": 1e-4, "high": 1e-2, "log": True}}
    values = {"trials": 4, "space": space, "pruner": {"kind": "none"}, **search}
    return resolve("demo", {"search": values, "training.epochs": 6})


def made_search(
    folder: Path, pool: MadePool, resolved: ResolvedRecipe | None = None, storage: str = "journal", **wanted: Any
) -> tuple[Search, list[str]]:
    """A search that is ready to run, and what it says."""
    told: list[str] = []
    base, _ = with_space(resolved or recipe_with())
    asked = Asked(wanted.pop("name", "demo"), folder, storage, None, "cpu", None, None)
    study = open_study(base, asked, lambda one: told.append(one.text))
    values = {"trials": 4, "parallel": 1, "on_gpu": False, "device_gib": None, "cpus": 2, "shares": None, **wanted}
    stop = values.pop("stop", None) or StopRequest()
    search = Search(
        study,
        Wanted(base=base, data=None, device="cpu", **values),
        pool,
        stop,
        lambda one: told.append(one.text),
        time.time(),
    )
    return search, told


def states(search: Search) -> list[str]:
    """Of all trials, in their order."""
    return [trial.state.name for trial in search.study.optuna.get_trials(deepcopy=False)]


def two_processes_share(storage: str, folder: Path) -> None:
    """Both take part in one study at once, and each of its nine trials is run by one of them."""
    words = [sys.executable, "-c", _PART, str(folder), storage, str(Path(__file__).parent)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(told)
    assert len(told[0] + told[1]) == len(set(told[0] + told[1])) == 9

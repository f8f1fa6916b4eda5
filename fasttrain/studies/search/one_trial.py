"""Owns one trial from its values to its end in the study: sent to a worker, reported, pruned, told, or queued again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.engine.planning.batch_policy import stepped_down
from fasttrain.errors import EXIT_DATA, EXIT_STORAGE, DataError, FasttrainError, RecipeError, StorageError
from fasttrain.recipe import ResolvedRecipe
from fasttrain.studies.search.choosing import suggested
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.pool import Worker
from fasttrain.studies.search.processes import give_up, set_aside
from fasttrain.studies.search.study import BASELINE
from fasttrain.studies.search.told import PRUNED, Told
from fasttrain.studies.search.trial_recipe import trial_recipe

if TYPE_CHECKING:
    from fasttrain.studies.search.running import Search

_LOOK_SECONDS = 0.2
_SAVE_SECONDS = 30.0
"""For a trial to save and end once it was asked to."""
_EARLY_SECONDS = 2.0
"""The same for one that has not taken its first step, and has nothing to save."""
_KILLED = -9
_NOT_THE_TRIALS: dict[int, type[FasttrainError]] = {EXIT_DATA: DataError, EXIT_STORAGE: StorageError}


class OneTrial:
    """A trial in a slot of a search."""

    def __init__(self, search: Search, slot: int, trial: Any) -> None:
        self.search = search
        self.study = search.study
        self.slot = slot
        self.trial = trial
        self._asked = search.asked
        self._score: float | None = None
        self._trained = False
        self._is_baseline = False
        self._run = Path()

    def run(self, worker: Worker | None) -> Worker | None:
        """Carries it out; gives the worker back where it is fit for another trial."""
        began = time.time()
        try:
            resolved = self._resolved()
        except RecipeError as error:
            self._failed("; ".join(error.faults))
            return worker
        went_on = self._run.exists()
        ended, worker = self._attempt(resolved, worker)
        if ended["status"] == "lost" and went_on and not self.search.stop.asked:
            self._run = self.study.folder.new_trial(self.trial.number)
            self._note("run", self._run.name)
            self._say(f"{'; '.join(ended['faults'])}: it begins anew in {self._run}", "warning")
            ended, worker = self._attempt(resolved, worker, anew=True)
        if ended["status"] == "lost":
            # It had nothing to lose: that is not what ended it
            ended["status"] = "failed"
        if ended["status"] == "memory" and not ended.get("lowered") and not self._lowered():
            smaller = stepped_down(resolved)
            if smaller is not None:
                text = _told_lowered(resolved, smaller)
                self._note("lowered", text)
                self._say(f"out of memory, tried once more with {text}", "warning")
                ended, worker = self._attempt(smaller, worker, anew=True)
        self._note("times", [round(began, 3), round(time.time(), 3)])
        self._tell(ended)
        return worker

    def _resolved(self) -> ResolvedRecipe:
        values = self._asked(lambda: suggested(self.trial, self.study.space))
        known = self._attributes()
        # Of a trial that goes on the run is that of the one that died
        former = known.get("run")
        folder = self.study.folder
        self._run = folder.new_trial(self.trial.number) if former is None else folder.path / former
        self._note("run", self._run.name)
        shown = ", ".join(
            f"{name}={_short(value)}" for name, value in zip(short_names(list(values)), values.values(), strict=True)
        )
        self._stands("getting ready")
        self._is_baseline = bool(known.get(BASELINE))
        own = " (the recipe's own values)" if self._is_baseline else ""
        goes_on = " (goes on)" if self._frozen().system_attrs.get("retry_history") else ""
        self._say(f"{shown}{own}{goes_on}")
        resolved = trial_recipe(self.search.wanted.base, values, f"search, trial {self.trial.number}")
        if known.get("lowered"):
            return stepped_down(resolved) or resolved
        return resolved

    def _attempt(
        self, resolved: ResolvedRecipe, worker: Worker | None, anew: bool = False
    ) -> tuple[dict[str, Any], Worker | None]:
        worker = worker or self.search.pool.worker()
        self.search.serve(self.slot, worker)
        wanted = self.search.wanted
        task = {
            "recipe": resolved.recipe.model_dump_json(),
            "origins": [[list(keys), origin] for keys, origin in resolved.origins.items()],
            "source": resolved.source,
            "run": str(self._run),
            "data": None if wanted.data is None else str(wanted.data),
            "device": wanted.device,
            "threads": self.search.threads(resolved.recipe),
            "shares": None if wanted.shares is None else str(wanted.shares),
            "anew": anew,
        }
        worker.lines.send({"task": task})
        ended = self._listen(worker)
        self.search.turns.released(self.slot)
        if ended is None:
            ended = self._died(worker)
            return ended, None
        return ended, None if ended.pop("retires") or self._fresh_each() else worker

    def _fresh_each(self) -> bool:
        """Memory of a CPU's trial is that of its process."""
        return "memory" in self.study.spec.objectives

    def _listen(self, worker: Worker) -> dict[str, Any] | None:
        """Until the trial has ended; None where its process is gone."""
        asked_at: float | None = None
        while True:
            word = worker.lines.next(_LOOK_SECONDS)
            if word is not None:
                if "ended" in word:
                    found: dict[str, Any] = word["ended"]
                    return found
                self._hear(word, worker)
            if worker.lines.over:
                return None
            stop = self.search.stop
            if stop.asked and asked_at is None:
                asked_at = time.monotonic()
                worker.lines.send({"stop": stop.reason, "code": stop.exit_code or 143})
            limit = _SAVE_SECONDS if self._trained else _EARLY_SECONDS
            if asked_at is not None and time.monotonic() - asked_at > limit:
                worker.kill()
                return None

    def _hear(self, word: dict[str, Any], worker: Worker) -> None:
        if "ready" in word:
            self._stands("ready, waits for the device")
            self.search.turns.ready(self.slot, lambda: self._go(worker))
        elif "released" in word:
            self.search.turns.released(self.slot)
        elif "rate" in word:
            self._trained = True
            self.search.turns.rate(self.slot, float(word["rate"]))
        elif "message" in word:
            self._say(word["message"], "warning")
        elif "epoch" in word:
            self._trained = True
            self._epoch(word, worker)

    def _go(self, worker: Worker) -> None:
        self._stands("training")
        worker.lines.send({"go": True})

    def _stands(self, text: str) -> None:
        self.search.stands[self.trial.number] = text

    def _epoch(self, word: dict[str, Any], worker: Worker) -> None:
        score = word["score"]
        if score is not None and self.study.better(score, self._score):
            self._score = score
        best = "" if self._score is None else f", {self.study.metric} {self._score:.4f} so far"
        self._stands(f"epoch {word['epoch']}/{word['epochs']}{best}")
        if score is None:
            return
        self.search.learnt_memory(word["gib"])
        pruned = False
        if len(self.study.spec.objectives) == 1:
            self._asked(lambda: self.trial.report(score, int(word["epoch"])))
            # What the others are compared with goes to its end
            prunable = int(word["epoch"]) < int(word["epochs"]) and not self._is_baseline
            pruned = prunable and bool(self._asked(self.trial.should_prune))
        worker.lines.send({"prune": pruned})

    def _died(self, worker: Worker) -> dict[str, Any]:
        if self.search.stop.asked:
            return {"status": "stopped"}
        status = self.search.pool.status_of(worker)
        if status == _KILLED and worker.killed_by_memory():
            return {"status": "memory", "faults": ["the system ended it, since this machine's memory ran out"]}
        how = f"by signal {-status}" if status is not None and status < 0 else f"with code {status}"
        return {"status": "died", "faults": [f"its process ended {how}"]}

    def _tell(self, ended: dict[str, Any]) -> None:
        state = require_optuna().trial.TrialState
        for key in ("spans", "gib", "device"):
            if ended.get(key):
                self._note(key, ended[key])
        if ended.get("lowered"):
            self._note("lowered", ended["lowered"])
        summary = ended.get("summary") or {}
        if ended["status"] == "stopped" or (summary.get("status") == "stopped" and summary.get("stopped_by") != PRUNED):
            self._interrupted(f"interrupted by {self.search.stop.reason}")
        elif ended["status"] == "died":
            text = give_up(self.study, self._frozen(), ended["faults"][0], self.search.presence.name, self._asked)
            if text is not None:
                self.search.tell(Told(text, "warning"))
        elif ended.get("exit_code") in _NOT_THE_TRIALS:
            # A full disk or data that went away is no trial's fault: this one goes on when that is mended
            self._interrupted("; ".join(ended["faults"]))
            raise _NOT_THE_TRIALS[ended["exit_code"]](ended["faults"])
        elif ended["status"] in ("memory", "failed"):
            self._failed("; ".join(ended["faults"]))
        elif summary.get("stopped_by") == PRUNED:
            self._note("reason", f"pruned after epoch {summary['epochs']}")
            self._asked(lambda: self.study.optuna.tell(self.trial, state=state.PRUNED))
            self._say(f"pruned after epoch {summary['epochs']}, {self._best(summary)}")
            self.search.ended(None)
        else:
            self._done(summary, ended)

    def _done(self, summary: dict[str, Any], ended: dict[str, Any]) -> None:
        best = (summary.get("best") or {}).get("value")
        if best is None:
            self._failed("its validation gave no score")
            return
        seconds = summary.get("seconds") or {}
        figures = {"score": best, "seconds": seconds.get("training"), "memory": ended.get("gib")}
        values = [figures[name] for name in self.study.spec.objectives]
        if None in values:
            missing = self.study.spec.objectives[values.index(None)]
            self._failed(f"its {missing} is not known")
            return
        self._asked(lambda: self.study.optuna.tell(self.trial, values))
        self._say(f"done, {self._best(summary)}")
        self.search.ended(None)

    def _interrupted(self, reason: str) -> None:
        """It goes on when the search is started again, and counts as the same trial."""
        self._note("reason", reason)
        self._note("interruptions", int(self._attributes().get("interruptions", 0)) + 1)
        set_aside(self.study.optuna, self._frozen(), self.search.presence.name, self._asked)
        self._say("it goes on when the search is started again, from what it saved")

    def _failed(self, reason: str) -> None:
        state = require_optuna().trial.TrialState
        self._note("reason", reason)
        self._asked(lambda: self.study.optuna.tell(self.trial, state=state.FAIL))
        self._say(f"failed: {reason}", "warning")
        self.search.ended(reason)

    def _note(self, key: str, value: Any) -> None:
        self._asked(lambda: self.trial.set_user_attr(key, value))

    def _attributes(self) -> dict[str, Any]:
        return dict(self._asked(lambda: self.trial.user_attrs))

    def _lowered(self) -> bool:
        return bool(self._attributes().get("lowered"))

    def _frozen(self) -> Any:
        number = self.trial.number
        trials = self._asked(lambda: self.study.optuna.get_trials(deepcopy=True))
        return next(trial for trial in trials if trial.number == number)

    def _best(self, summary: dict[str, Any]) -> str:
        value = (summary.get("best") or {}).get("value")
        return "no score" if value is None else f"{self.study.metric} {value:.4f}"

    def _say(self, text: str, level: str = "info") -> None:
        self.search.tell(Told(f"trial {self.trial.number}: {text}", level))


def _short(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _told_lowered(before: ResolvedRecipe, after: ResolvedRecipe) -> str:
    first, second = before.recipe.training, after.recipe.training
    return (
        f"training.batch_size {first.batch_size} → {second.batch_size}, training.accumulate {first.accumulate} → "
        f"{second.accumulate}"
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """The last word of each path, `noise.probability` where several end in the same one."""
    last = [path.rpartition(".")[2] for path in paths]
    return [
        ".".join(path.split(".")[-2:]) if last.count(name) > 1 else name for path, name in zip(paths, last, strict=True)
    ]

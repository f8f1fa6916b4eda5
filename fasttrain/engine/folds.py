"""Owns training every fold of a k-fold split in turn: a run a fold, the scores of all cases pooled, the networks an ensemble."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fasttrain.engine.ending import RunResult
from fasttrain.engine.limits import Account, Limits, LimitTimer, ended_by_limit, folds_gone, is_over
from fasttrain.engine.run import resume, train
from fasttrain.engine.stop import Following, Stopped, StopRequest
from fasttrain.errors import EXIT_DONE, FasttrainError
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.recipe import Recipe, ResolvedRecipe, resolve
from fasttrain.recipe.data_spec import check_folds
from fasttrain.recipe.task import is_target
from fasttrain.run_folder import FOLDS_KEYS, FORMAT_VERSION, RunFolder
from fasttrain.run_paths import make_new_run_path
from fasttrain.scoring import CaseScore, ClassScore, summarise
from fasttrain.scoring.slices import SliceDices
from fasttrain.telemetry.attempts import known_attempts, with_forgotten
from fasttrain.telemetry.events import Message, Observer
from fasttrain.telemetry.summary import write_summary
from fasttrain.whole_files import read_record, write_json, write_whole

_POOLED = {"status", "best", "seconds", "cases"}
"""What is taken from the summaries of the folds."""
Watch = Callable[[int, int], Sequence[Observer]]
"""Takes a fold (from 0) and their number; gives the observers of that fold's run."""


def train_folds(
    recipe: ResolvedRecipe | str,
    *,
    data: Path | str | None = None,
    run: Path | str | None = None,
    device: str = "auto",
    watch: Watch = lambda fold, folds: (),
    stop: StopRequest | None = None,
    began: float | None = None,
    limits: Limits | None = None,
    ranks: Ranks = ONLY_ONE,
) -> RunResult:
    """Trains every fold of a recipe with a k-fold split, `fold_0`, `fold_1` … in one run folder, and pools their scores.

    Each fold is a run like any other. `summary.json` of the whole holds, for each case, the score of the one network that never
    saw it. limits: hours and cost are those of all folds, from `began` (Unix seconds) on; `until_dice` ends a fold. Raises
    RecipeError for another split, and what a fold's run raises.
    """
    resolved = resolve(recipe) if isinstance(recipe, str) else recipe
    split = check_folds(resolved.recipe.data.split)
    limits = limits or Limits()
    limits.check_score(resolved.recipe.task_facts)
    folder = RunFolder(Path(run) if run is not None else make_new_run_path(resolved.recipe.name))
    try:
        folder.create()
        folder.checkpoints.rmdir()
        with write_whole(folder.recipe) as stream:
            stream.write(resolved.as_yaml().encode())
        place = str(Path(data).absolute()) if data is not None else None
        record = {"format": FORMAT_VERSION, "folds": split.folds, "data": place, "device": device}
        write_json(folder.folds, record)
        return _Folds(folder, resolved, record, watch, stop or StopRequest(), began, limits, ranks).run()
    finally:
        folder.release()


def resume_folds(
    run: Path | str,
    *,
    data: Path | str | None = None,
    device: str | None = None,
    watch: Watch = lambda fold, folds: (),
    stop: StopRequest | None = None,
    began: float | None = None,
    limits: Limits | None = None,
    asked_for: bool = True,
    ranks: Ranks = ONLY_ONE,
) -> RunResult:
    """Goes on where `train_folds` ended: folds that are done stay, the one that was cut short is resumed, the rest is trained."""
    folder = RunFolder(Path(run))
    try:
        limits = limits or Limits()
        if is_over(folder, limits, asked_for):
            return RunResult(folder.path, json.loads(folder.summary.read_text(encoding="utf-8")), EXIT_DONE)
        folder.claim()
        folder.reopen()
        record = read_record(folder.folds, FOLDS_KEYS)
        record |= {"data": str(data)} if data is not None else {}
        record |= {"device": device} if device is not None else {}
        recipe = resolve(str(folder.recipe))
        return _Folds(folder, recipe, record, watch, stop or StopRequest(), began, limits, ranks).run()
    finally:
        folder.release()


class _Folds:
    def __init__(
        self,
        folder: RunFolder,
        recipe: ResolvedRecipe,
        record: dict[str, Any],
        watch: Watch,
        stop: StopRequest,
        began: float | None,
        limits: Limits,
        ranks: Ranks,
    ) -> None:
        self.ranks = ranks
        self.folder = folder
        self.recipe = recipe
        self.count: int = record["folds"]
        self.data: str | None = record["data"]
        self.device: str = record["device"]
        self.watch = watch
        self.stop = stop
        self.limits = limits
        runs = [RunFolder(folder.fold(fold)) for fold in range(self.count)]
        of_folds = [attempt for run in runs for attempt in known_attempts(run.events, run.read_summary())]
        # Of a fold whose folder is gone the whole still knows
        attempts = with_forgotten(of_folds, folder.read_summary())
        self.account = Account(began or time.time(), limits.price_per_hour, attempts)

    def run(self) -> RunResult:
        self.stop.begun = True
        self.stop.goes_on_with = f"fasttrain resume {shlex.quote(str(self.folder.path))}{self.limits.options}"
        timer = LimitTimer(self.limits, self.account, self.stop)
        try:
            for fold in range(self.count):
                result = self._train(fold)
                # Early stopping ends a fold; anything else that ends one early ends them all
                if result.summary["status"] != "done":
                    return self._end("stopped", result.exit_code, result.summary["stopped_by"])
                if (limit := ended_by_limit(result.summary) or "").startswith("--max"):
                    return self._end("done", EXIT_DONE, limit)
        except Stopped:
            # While the cases of a fold were checked
            status = "done" if self.stop.exit_code == EXIT_DONE else "stopped"
            return self._end(status, self.stop.exit_code, self.stop.reason)
        except BaseException as error:
            self._end("failed", error.exit_code if isinstance(error, FasttrainError) else 1, None, str(error))
            raise
        finally:
            timer.close()
        return self._end("done", EXIT_DONE, None)

    def _train(self, fold: int) -> RunResult:
        path = self.folder.fold(fold)
        run = RunFolder(path)
        # Each fold has a flag of its own, so that its early stopping is not the next one's
        stop = Following(self.stop)
        observers = self.watch(fold, self.count)
        # Hours and money are watched for the whole
        limits = self.limits.of_fold()
        if run.holds_a_run() and not run.never_trained():
            limit = ended_by_limit(run.read_summary())
            # Without the scores of its cases they would be missing among those of all: they are validated again
            if (limit or "").startswith("--max") or (limit is None and not run.read_summary().get("cases")):
                run.reopen()
            return resume(
                path,
                data=self.data,
                device=self.device,
                observers=observers,
                stop=stop,
                limits=limits,
                ranks=self.ranks,
            )
        if self._was_begun(fold):
            for observer in observers:
                observer.on_event(Message(f"{path} is gone, though it was begun: that fold is trained anew", "warning"))
        return train(
            self.recipe.with_values({("data", "split", "fold"): fold}, "--fold all"),
            data=self.data,
            run=path,
            device=self.device,
            observers=observers,
            stop=stop,
            began=time.time(),
            limits=limits,
            ranks=self.ranks,
        )

    def _was_begun(self, fold: int) -> bool:
        """Whether a fold that holds no run once did: one fold is trained after the other."""
        if RunFolder(self.folder.fold(fold)).holds_a_run():
            return False
        later = any(RunFolder(self.folder.fold(other)).holds_a_run() for other in range(fold + 1, self.count))
        return later or self.folder.fold(fold) in folds_gone(self.folder)

    def _end(self, status: str, exit_code: int, stopped_by: str | None, error: str | None = None) -> RunResult:
        recipe = self.recipe.recipe
        # As they lie in the folders: a fold that was refused this time has the scores that it had before
        runs = [RunFolder(self.folder.fold(fold)) for fold in range(self.count)]
        summaries = {run.path.name: summary for run in runs if (summary := run.read_summary()).keys() >= _POOLED}
        cases = {name: scores for summary in summaries.values() for name, scores in summary["cases"].items()}
        score, pooled = _pooled(cases, recipe)
        slices = {
            name: found for summary in summaries.values() for name, found in (summary.get("case_slices") or {}).items()
        }
        pooled |= _pooled_slices(slices, recipe.data.scored_names) if slices else {}
        seconds = [summary["seconds"] for summary in summaries.values()]
        write_summary(
            self.folder.summary,
            status=status,
            stopped_by=stopped_by,
            exit_code=exit_code,
            best={"metric": f"val_{recipe.task_facts.metric}", "value": score, "epoch": None},
            seconds={key: sum(one[key] or 0.0 for one in seconds) for key in ("total", "training", "validation")},
            steps=sum(_steps(self.folder.fold(fold)) for fold in range(self.count)),
            error=error,
            **self.account.record(None),
            folds=[
                {"run": name, "status": summary["status"], "best": summary["best"]}
                for name, summary in summaries.items()
            ],
            **pooled,
            cases=cases,
            skipped_cases=next((summary.get("skipped_cases", {}) for summary in summaries.values()), {}),
        )
        return RunResult(self.folder.path, json.loads(self.folder.summary.read_text(encoding="utf-8")), exit_code)


def _pooled(cases: dict[str, dict[str, float | None]], recipe: Recipe) -> tuple[float | None, dict[str, Any]]:
    """The headline figure over the cases of all folds, and what else the summary says of them."""
    names = recipe.data.scored_names
    if recipe.task == "dose":
        columns = {
            key: [value for scores in cases.values() if (value := scores.get(key)) is not None]
            for key in ("dose_score", *names)
        }
        means = {key: fmean(values) if values else None for key, values in columns.items()}
        score = means.pop("dose_score")
        # Of a target three metrics, of an organ two: the mean over all metrics of all cases, as one run has it
        errors = [(3 if is_target(name) else 2, value) for name in names for value in columns[name]]
        metrics = sum(count for count, _ in errors)
        dvh = sum(count * value for count, value in errors) / metrics if metrics else None
        counts = {name: len(columns[name]) for name in names}
        return score, {"dvh_score": dvh, "dvh_by_structure": means, "structure_counts": counts}
    pooled = summarise(
        [
            CaseScore(name, tuple(ClassScore(dices[class_name], None, False) for class_name in names), None)
            for name, dices in cases.items()
        ],
        names,
    )
    return pooled.dice, {"dice_by_class": pooled.dice_by_class, "dice_counts": pooled.dice_counts}


def _pooled_slices(cases: Mapping[str, SliceDices], names: Sequence[str]) -> dict[str, Any]:
    """The Dice of single slices over the cases of all folds, as one validation of all of them would have it."""
    found = {name: [one[name] for one in cases.values() if name in one] for name in names}
    counts = {name: sum(count for _, count in column) for name, column in found.items()}
    means = {
        name: sum(mean * count for mean, count in column) / counts[name] if counts[name] else None
        for name, column in found.items()
    }
    known = [mean for mean in means.values() if mean is not None]
    return {
        "slice_dice": fmean(known) if known else None,
        "slice_dice_by_class": means,
        "slice_counts": counts,
        "case_slices": dict(cases),
    }


def _steps(run: Path) -> int:
    """Optimiser steps that a fold has taken, a failed one too: what was trained must not be taken for nothing."""
    try:
        return int(json.loads(RunFolder(run).summary.read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return int(RunFolder(run).has_checkpoints())

"""Owns how a study stands: its trials by state, what pruning and the device did, the best, and what mattered."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrain.studies.search.choosing import rounded
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.processes import is_dead
from fasttrain.studies.search.storage import patiently
from fasttrain.studies.search.study import BASELINE, BOUND, Kept, counted_trials, superseded

_STATES = ("complete", "pruned", "failed", "running", "waiting")


def standing_of(kept: Kept) -> dict[str, Any]:
    """Plain values for JSON; None where nothing is known."""
    trials = patiently(kept.place, lambda: kept.optuna.get_trials(deepcopy=False))
    attributes = patiently(kept.place, lambda: kept.optuna.user_attrs)
    counted = counted_trials(trials)
    by_state = {state: [trial for trial in counted if state_of(trial) == state] for state in _STATES}
    ended = len(by_state["complete"]) + len(by_state["pruned"])
    return {
        "study": str(kept.folder.path),
        "name": kept.name,
        "storage": kept.place.shown,
        "metric": attributes.get("fasttrain_metric"),
        "objectives": _objectives(attributes),
        "wanted": kept.record.get("trials"),
        "trials": len(counted),
        "states": {
            state: {
                "count": len(some),
                "share": len(some) / len(counted) if counted else None,
                "mean_seconds": _mean_seconds(some),
            }
            for state, some in by_state.items()
        },
        "dead": [trial.number for trial in by_state["running"] if _is_dead(kept, trial)],
        "gone_on_with": len(superseded(trials)),
        "pruning_rate": len(by_state["pruned"]) / ended if ended else None,
        "pruned_after_epochs": sorted(max(trial.intermediate_values, default=0) for trial in by_state["pruned"]),
        "out_of_memory": sum(bool(trial.user_attrs.get("lowered")) for trial in counted)
        + sum("memory" in str(trial.user_attrs.get("reason", "")) for trial in by_state["failed"]),
        "failures": {
            str(trial.number): trial.user_attrs.get("reason") or "no sign of life" for trial in by_state["failed"]
        },
        "best": best_trials(kept),
        "baseline": _baseline(counted, _objectives(attributes)),
        "importance": importance_of(kept, by_state["complete"]),
        "device": device_use(trials),
        "space": list((attributes.get(BOUND) or {}).get("search", {}).get("space", {})),
    }


def state_of(trial: Any) -> str:
    """`complete`, `pruned`, `failed`, `running` or `waiting`."""
    name = str(trial.state.name).lower()
    return "failed" if name == "fail" else name


def _is_dead(kept: Kept, trial: Any) -> bool:
    """Whether a trial that the storage has as running was left so by a process that is gone."""
    name = trial.user_attrs.get("process")
    return name is not None and is_dead(kept.folder, name)


def best_trials(kept: Kept) -> list[dict[str, Any]]:
    """The best trial; of several objectives those that none beats in all of them, the best score first."""
    state = require_optuna().trial.TrialState
    trials = patiently(kept.place, lambda: kept.optuna.get_trials(deepcopy=False, states=(state.COMPLETE,)))
    if not trials:
        return []
    several = len(kept.optuna.directions) > 1
    found = patiently(kept.place, lambda: list(kept.optuna.best_trials) if several else [kept.optuna.best_trial])
    names = _objectives(patiently(kept.place, lambda: kept.optuna.user_attrs))
    place = names.index("score")
    rising = kept.optuna.directions[place].name == "MAXIMIZE"
    ordered = sorted(found, key=lambda trial: trial.values[place], reverse=rising)
    return [
        {
            "trial": trial.number,
            "values": dict(zip(names, trial.values, strict=True)),
            "params": {path: rounded(value) for path, value in trial.params.items()},
            "run": str(kept.folder.path / str(trial.user_attrs.get("run"))),
            "baseline": bool(trial.user_attrs.get(BASELINE)),
        }
        for trial in ordered
    ]


def _baseline(counted: Sequence[Any], names: Sequence[str]) -> dict[str, Any] | None:
    """The trial with the recipe's own values; its `values` are None until it has come to its end."""
    found = next((trial for trial in counted if trial.user_attrs.get(BASELINE)), None)
    if found is None:
        return None
    values = dict(zip(names, found.values, strict=True)) if state_of(found) == "complete" else None
    return {"trial": found.number, "state": state_of(found), "values": values}


def _objectives(attributes: Mapping[str, Any]) -> list[str]:
    return list(attributes.get("fasttrain_objectives", ["score"]))


def importance_of(kept: Kept, complete: Sequence[Any]) -> dict[str, float] | None:
    """What share of the scores' variance hangs on each value (Optuna's evaluator); None for fewer than four trials."""
    optuna = require_optuna()
    if len(complete) < 4 or len(kept.optuna.directions) > 1:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = optuna.importance.get_param_importances(
                kept.optuna, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
    except Exception:
        # Such as scores that are all alike
        return None
    return {path: float(share) for path, share in found.items()}


def device_use(trials: Sequence[Any]) -> dict[str, Any] | None:
    """How much of their time the devices trained and validated, from the start of each process to its last trial's end.

    None before a trial has ended. Trials that train at once count once.
    """
    processes: dict[str, list[Any]] = {}
    for trial in trials:
        if trial.user_attrs.get("times") and trial.user_attrs.get("process"):
            processes.setdefault(trial.user_attrs["process"], []).append(trial)
    wall = training = busy = summed = 0.0
    for some in processes.values():
        began = min(float(trial.user_attrs.get("process_began") or trial.user_attrs["times"][0]) for trial in some)
        ended = max(float(trial.user_attrs["times"][1]) for trial in some)
        spans = [trial.user_attrs.get("spans") or {} for trial in some]
        trained = [tuple(span) for one in spans for span in one.get("training", ())]
        validated = [tuple(span) for one in spans for span in one.get("validation", ())]
        wall += ended - began
        training += covered(trained)
        busy += covered([*trained, *validated])
        summed += sum(end - begin for begin, end in trained)
    if not processes or wall <= 0:
        return None
    peaks = [float(trial.user_attrs["gib"]) for trial in trials if trial.user_attrs.get("gib")]
    return {
        "processes": len(processes),
        "wall_seconds": wall,
        "training_seconds": training,
        "training_share": training / wall,
        "training_or_validating_share": busy / wall,
        "trials_at_once": summed / training if training else None,
        "peak_gib": max(peaks, default=None),
        "name": next((trial.user_attrs["device"] for trial in trials if trial.user_attrs.get("device")), None),
    }


def covered(spans: Sequence[Sequence[float]]) -> float:
    """Seconds in which at least one of the spans (begin, end) lies."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted((span[0], span[1]) for span in spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def _mean_seconds(trials: Sequence[Any]) -> float | None:
    lengths = [times[1] - times[0] for trial in trials if (times := trial.user_attrs.get("times"))]
    return statistics.fmean(lengths) if lengths else None


def running_runs(kept: Kept) -> list[tuple[int, Path]]:
    """(trial, folder of its run) of those that are at work."""
    state = require_optuna().trial.TrialState
    trials = patiently(kept.place, lambda: kept.optuna.get_trials(deepcopy=False, states=(state.RUNNING,)))
    return [(trial.number, kept.folder.path / str(run)) for trial in trials if (run := trial.user_attrs.get("run"))]

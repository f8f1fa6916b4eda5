"""Owns the pictures of a study: its history, what its values matter, and the values of each trial side by side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fasttrain.errors import StorageError
from fasttrain.studies.search.extra import require_optuna
from fasttrain.studies.search.standing import importance_of
from fasttrain.studies.search.storage import patiently
from fasttrain.studies.search.study import Kept
from fasttrain.telemetry.figure_file import save_figure


def write_pictures(kept: Kept) -> list[Path]:
    """`history.png`, `importance.png`, `parallel_coordinates.png`, each as soon as there is something to draw; the files written.

    Raises StorageError where one cannot be written.
    """
    state = require_optuna().trial.TrialState
    complete = patiently(kept.place, lambda: kept.optuna.get_trials(deepcopy=False, states=(state.COMPLETE,)))
    if not complete:
        return []
    folder = kept.folder.plots
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from error
    names = patiently(kept.place, lambda: kept.optuna.user_attrs).get("fasttrain_objectives", ["score"])
    written = [save_figure(_history(kept, complete, names), folder / "history.png")]
    if (shares := importance_of(kept, complete)) is not None:
        written.append(save_figure(_importance(shares), folder / "importance.png"))
    if len(complete) > 1 and complete[0].params:
        written.append(save_figure(_coordinates(complete, names.index("score")), folder / "parallel_coordinates.png"))
    return written


def _figure(height: float = 4.8) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.add_subplot()


def _history(kept: Kept, complete: Sequence[Any], names: Sequence[str]) -> Any:
    place = names.index("score")
    rising = kept.optuna.directions[place].name == "MAXIMIZE"
    better: Callable[..., float] = max if rising else min
    state = require_optuna().trial.TrialState
    figure, axes = _figure()
    numbers, scores = [trial.number for trial in complete], [trial.values[place] for trial in complete]
    axes.scatter(numbers, scores, color="C0", label="complete", zorder=3)
    pruned = patiently(kept.place, lambda: kept.optuna.get_trials(deepcopy=False, states=(state.PRUNED,)))
    shown = [
        (trial.number, better(trial.intermediate_values.values())) for trial in pruned if trial.intermediate_values
    ]
    if shown:
        axes.scatter(*zip(*shown, strict=True), color="0.6", marker="x", label="pruned")
    best = [better(scores[: count + 1]) for count in range(len(scores))]
    axes.step(numbers, best, where="post", color="C1", label="best so far")
    axes.set_xlabel("trial")
    axes.set_ylabel("score")
    axes.legend()
    axes.grid(True, alpha=0.3)
    return figure


def _importance(shares: dict[str, float]) -> Any:
    figure, axes = _figure(1.2 + 0.4 * len(shares))
    names = list(reversed(shares))
    axes.barh(names, [shares[name] for name in names], color="C0")
    axes.set_xlabel("share of the scores' variance")
    return figure


def _coordinates(complete: Sequence[Any], place: int) -> Any:
    """A line a trial over all values, coloured by its score; numbers on their own scale, choices by their order."""
    import matplotlib

    paths = list(dict.fromkeys(path for trial in complete for path in trial.params))
    scores = [trial.values[place] for trial in complete]
    low, high = min(scores), max(scores)
    figure, axes = _figure()
    colours = matplotlib.colormaps["viridis"]
    scaled = {path: _scaled(path, complete) for path in paths}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for trial, score in zip(complete, scores, strict=True):
            heights = [scaled[path].get(trial.number, float("nan")) for path in paths]
            share = (score - low) / (high - low) if high > low else 1.0
            axes.plot(range(len(paths)), heights, color=colours(share), linewidth=1.2, alpha=0.8)
    axes.set_xticks(range(len(paths)), [path.replace(".", "\n") for path in paths], fontsize=7)
    axes.set_yticks([])
    axes.set_title(f"brighter is the higher score ({low:.4f} to {high:.4f})", fontsize=10)
    return figure


def _scaled(path: str, complete: Sequence[Any]) -> dict[int, float]:
    """{trial: height from 0 to 1} of the trials that have the value."""
    import math

    optuna = require_optuna()
    having = [trial for trial in complete if path in trial.params]
    kind = having[0].distributions[path]
    if isinstance(kind, optuna.distributions.CategoricalDistribution):
        return {
            trial.number: kind.to_internal_repr(trial.params[path]) / max(len(kind.choices) - 1, 1) for trial in having
        }
    measure = math.log if kind.log else float
    low, high = measure(kind.low), measure(kind.high)
    return {trial.number: (measure(trial.params[path]) - low) / (high - low) if high > low else 0.5 for trial in having}

"""Owns what past runs on this kind of machine tell about the next one: how long it will take, and what it will cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from fasttrain.history.events_so_far import number, text
from fasttrain.history.standing import RunReader, Standing
from fasttrain.run_folder import RunFolder
from fasttrain.run_paths import runs_by_age
from fasttrain.telemetry.clock import TimeLeft, estimate_seconds_left

_NO_MATTER = (
    *(
        "name",
        "schedule",
        "output",
        "acceleration",
        "validation.every",
        "training.epochs",
        "training.iterations_per_epoch",
    ),
    *(
        "training.seed",
        "training.early_stopping",
        "training.batch_policy",
        "optimizer.learning_rate",
        "optimizer.weight_decay",
    ),
    *(
        "data.name",
        "data.split",
        "data.bad_cases",
        "data.source.cases",
        "data.cache",
        "data.workers",
        "data.prefetch_factor",
    ),
    *("data.worker_kind", "data.pin_memory", "data.copy_stream"),
)
"""Values by which a step takes no longer or shorter, and those whose outcome the plan has."""
_DECIDED = (
    *("amp", "channels_last", "tf32", "threads", "fused_layers", "cuda_graphs", "compile", "activation_checkpointing"),
    *("fused_optimizer", "cache", "workers", "worker_kind"),
)
_MOST_RUNS = 300
_SAME_BATCH = 0.02
_MOST_NAMED = 3
_HOUR = 3600.0


@dataclass(frozen=True)
class Wanted:
    """The run that is to be estimated: recipe and plan as plain values, the machine by its device's name and its CPUs.

    `count`: how many such runs follow each other, as the folds of a split do.
    """

    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    device_name: str
    on_gpu: bool
    cpus: int
    count: int = 1


@dataclass(frozen=True)
class Estimate:
    """What a run will take by the pace of a past one. Seconds are of one run, `hours` and `cost` (USD) of all that follow.

    `other_seconds`: at the end of the past run and between its epochs: pictures, plots, checkpoints.
    `epochs_measured` of its epochs count.
    """

    run: str
    began: float | None
    seconds_per_epoch: float
    seconds_per_validation: float | None
    seconds_to_first_step: float
    other_seconds: float
    epochs_measured: int
    hours: float
    cost: float | None

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def estimate(wanted: Wanted, bases: Sequence[Path], price_per_hour: float | None = None) -> Estimate | str:
    """What the newest past run under `bases` of the same shape, on the same kind of machine and by the same plan tells.

    One of which two epochs or more are known is taken before one whose single epoch has its start-up in it. Where there is none,
    a sentence says so, and what the newest that comes near has otherwise.
    """
    single: Estimate | None = None
    nearest: tuple[Path, list[str]] | None = None
    for path in _runs(bases):
        other = _otherwise(RunFolder(path), wanted)
        if other is None:
            continue
        if other:
            nearest = min((nearest, (path, other)), key=lambda one: len(one[1])) if nearest else (path, other)
            continue
        found = _by(path, wanted, price_per_hour)
        if found is not None and found.epochs_measured > 1:
            return found
        single = single or found
    return single if single is not None else _none(bases, nearest)


def _none(bases: Sequence[Path], nearest: tuple[Path, list[str]] | None) -> str:
    places = " and ".join(dict.fromkeys(str(base) for base in bases))
    told = f"not known: under {places} there is no past run of this shape by the same plan on this kind of machine"
    if nearest is None:
        return told
    path, keys = nearest
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return f"{told} ({path} differs in {', '.join(keys[:_MOST_NAMED])}{more})"


def _runs(bases: Sequence[Path]) -> Iterator[Path]:
    """Newest first; of a folder of all folds each fold, the last one first, since the first one alone loaded the program."""
    seen: set[Path] = set()
    for base in bases:
        with contextlib.suppress(OSError):
            for run in runs_by_age(base)[:_MOST_RUNS]:
                for path in sorted(run.path.glob("fold_*"), reverse=True) if run.folds.exists() else [run.path]:
                    if (real := path.resolve()) not in seen:
                        seen.add(real)
                        yield path


def _otherwise(folder: RunFolder, wanted: Wanted) -> list[str] | None:
    """The keys of recipe and plan by which a past run was another; None for one on another machine, or without its plan."""
    try:
        start = RunReader(folder.path).read_start()
    except OSError:
        return None
    environment, plan = start
    hardware, recipe = environment.get("hardware"), plan.get("recipe")
    if not isinstance(hardware, dict) or not isinstance(recipe, dict):
        return None
    if hardware.get("device_name") != wanted.device_name or (not wanted.on_gpu and hardware.get("cpus") != wanted.cpus):
        return None
    then, now = dict(_leaves(recipe)), dict(_leaves(wanted.recipe))
    # A key that one of them does not have is of another version, or of a section whose `kind` differs anyway
    keys = [key for key in then if key in now and then[key] != now[key] and not _is_no_matter(key)]
    decided = [key for key in _DECIDED if key in plan and key in wanted.plan and plan[key] != wanted.plan[key]]
    ranks = [one.get("sizes", {}).get("ranks", 1) for one in (plan, wanted.plan)]
    return keys + decided + (["the number of ranks"] if ranks[0] != ranks[1] else [])


def _by(path: Path, wanted: Wanted, price: float | None) -> Estimate | None:
    reader = RunReader(path)
    run = reader.read()
    if text(run.started, "device") not in (None, wanted.device_name):
        # It went on elsewhere
        return None
    sizes, training = wanted.plan["sizes"], wanted.recipe["training"]
    effective = sizes["effective_batch"]
    paces = _seconds_per_step(run, effective)
    if not paces:
        return None
    then = number(run.plan, "sizes", "validation_cases")
    scale = sizes["validation_cases"] / then if then else 1.0
    validations = [seconds * scale for seconds in reader.validation_seconds]
    epochs, steps = training["epochs"], sizes["steps_per_epoch"]
    to_come = TimeLeft(epochs, steps, wanted.recipe["validation"]["every"]).validations_left(0)
    working = estimate_seconds_left(epochs * steps, to_come, paces, validations) or 0.0
    own = _start(reader, run)
    # A fold after the first begins in a process that has loaded all
    whole = RunFolder(path).whole()
    alone = RunReader(RunFolder(whole).fold(0)) if whole != path else reader
    start = _start(alone, alone.read())
    rest = _rest(run, own)
    hours = (start + (wanted.count - 1) * own + wanted.count * (working + rest)) / _HOUR
    return Estimate(
        run=str(path),
        began=run.began,
        seconds_per_epoch=median_low(paces) * steps,
        seconds_per_validation=median_low(validations) if validations else None,
        seconds_to_first_step=start,
        other_seconds=rest,
        epochs_measured=len(paces),
        hours=hours,
        cost=None if price is None else hours * price,
    )


def _seconds_per_step(run: Standing, effective_batch: int) -> list[float]:
    """Of each epoch whose steps were of the same number of patches: a run may have gone on with another batch."""
    found, before = [], 0.0
    for row in run.rows:
        step, seconds, rate = row.get("step"), row.get("seconds"), row.get("patches_per_second")
        if step is not None and seconds and rate and step > before:
            patches = rate * seconds / (step - before)
            if abs(patches / effective_batch - 1) < _SAME_BATCH:
                found.append(seconds / (step - before))
        before = step or before
    return found


def _start(reader: RunReader, run: Standing) -> float:
    """Seconds to the first step of the newest attempt; 0 where it took none."""
    return number(run.summary, "seconds", "to_first_step") or reader.seconds_to_first_step or 0.0


def _rest(run: Standing, start: float) -> float:
    """What a whole run took besides; it can be told of one attempt that came to its end."""
    total = number(run.summary, "seconds", "total")
    if run.status != "done" or run.attempts != 1 or total is None:
        return 0.0
    known = [number(run.summary, "seconds", part) or 0.0 for part in ("training", "validation")]
    return max(total - start - sum(known), 0.0)


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _is_no_matter(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in _NO_MATTER)

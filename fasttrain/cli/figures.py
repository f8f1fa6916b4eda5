"""Owns how the figures of a run are written for a person: one short text a number, a unit where there is one."""

from __future__ import annotations

import math
import unicodedata
from typing import TYPE_CHECKING

from fasttrain.telemetry.events import EpochEnded, FirstStep, RunEnded, RunStarted, StepLogged, ValidationFigures
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.history.estimate import Estimate


def loss_text(loss: float) -> str:
    """`0.412`; small and large losses in powers of ten, so that none reads as 0.000."""
    if not math.isfinite(loss):
        return str(loss)
    return f"{loss:.3f}" if loss == 0 or 0.01 <= abs(loss) < 10_000 else scientific_text(loss)


def scientific_text(value: float) -> str:
    """`2.1e-3`, without the zeros that Python puts into the exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def score_text(value: float | None, digits: int) -> str:
    """The score, `–` where no case counted."""
    return "–" if value is None else f"{value:.{digits}f}"


def rate_text(patches_per_second: float) -> str:
    """`54.2 patches/s`, without decimals from 100 on."""
    digits = 1 if patches_per_second < 100 else 0
    return f"{patches_per_second:.{digits}f} patches/s"


def share_text(share: float) -> str:
    """`3%` of a share between 0 and 1."""
    return f"{share * 100:.0f}%"


def duration_text(seconds: float) -> str:
    """`45 s`, `2 min`, `1 h 05 min` or `2 d 3 h`."""
    if not math.isfinite(seconds):
        return "unknown time"
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def classes_text(scores: ValidationFigures) -> str:
    """`anterior 0.88, posterior 0.86`."""
    return ", ".join(f"{one_line(name)} {score_text(value, 2)}" for name, value in scores.dice_by_class.items())


def scores_text(scores: ValidationFigures) -> str:
    """`dice 0.871 (anterior 0.88, posterior 0.86)`, with slices their mean, or `dose score 3.12 Gy  DVH score 2.40 Gy`."""
    if scores.dose_score is not None:
        return f"dose score {score_text(scores.dose_score, 3)} Gy  DVH score {score_text(scores.dvh_score, 3)} Gy"
    classes = f" ({classes_text(scores)})" if scores.dice_by_class else ""
    slices = f"  of slices {score_text(scores.slice_dice, 3)}" if scores.slice_dice is not None else ""
    return f"dice {score_text(scores.dice, 3)}{classes}{slices}"


def device_text(event: EpochEnded | StepLogged) -> str | None:
    """`GPU 93%, 41.2 GiB`; None where the driver gives no figures."""
    parts = []
    if event.gpu_utilisation is not None:
        parts.append(share_text(event.gpu_utilisation))
    if event.gpu_gib is not None:
        parts.append(f"{event.gpu_gib:.1f} GiB")
    return "GPU " + ", ".join(parts) if parts else None


def start_lines(event: RunStarted) -> list[str]:
    """What a person wants to know before the first step: the run, its size, and each decision with its reason."""
    lines = [
        f"{event.recipe} on {event.device}: {counted(event.epochs, 'epoch')} of {counted(event.steps_per_epoch, 'step')}, "
        f"{event.training_cases} training and {counted(event.validation_cases, 'validation case')}",
        f"run folder: {event.run}",
    ]
    if event.limits:
        lines.append(event.limits)
    if event.outline:
        lines.append(f"network: {event.outline}")
    if event.resumed_step is not None:
        lines.append(f"resumed at step {event.resumed_step}")
    lines += [
        f"{name}: {value} ({reason})" if reason else f"{name}: {value}" for name, value, reason in event.decisions
    ]
    return [one_line(line) for line in lines]


def hours_text(hours: float | None, cost: float | None) -> str | None:
    """`in all 3 h 10 min, 7.92 USD`; without a price the time alone, None where nothing is known."""
    if hours is None:
        return None
    return f"in all {duration_text(hours * 3600)}" + ("" if cost is None else f", {cost:.2f} USD")


def estimate_text(expected: Estimate | str) -> str:
    """`about 3 h 10 min, 7.92 USD, by runs/x on this kind of machine: 12.3 s an epoch, 8.1 s a validation, …`."""
    if isinstance(expected, str):
        return expected
    cost = "" if expected.cost is None else f", {expected.cost:.2f} USD"
    parts = [f"{expected.seconds_per_epoch:.3g} s an epoch"]
    if expected.seconds_per_validation is not None:
        parts.append(f"{expected.seconds_per_validation:.3g} s a validation")
    parts.append(f"{expected.seconds_to_first_step:.3g} s to the first step")
    parts.append(f"{expected.other_seconds:.3g} s for the rest")
    alone = "; a single epoch was measured, which has its start-up in it" if expected.epochs_measured == 1 else ""
    about = duration_text(expected.hours * 3600)
    return f"about {about}{cost}, by {expected.run} on this kind of machine: {', '.join(parts)}{alone}"


def first_step_line(event: FirstStep) -> str:
    """`first step after 9.4 s: import 3.1, check 0.5, read 2.0, first step 0.4`; parts that round to nothing are left out."""
    parts = [f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in event.parts.items() if seconds >= 0.05]
    return f"first step after {event.seconds:.1f} s: {', '.join(parts)}"


def end_line(event: RunEnded, further: str = "") -> str:
    """How the run ended: status, best score and its epoch, run folder, and how to go on where it was cut short; further: options
    of that command which the run knows nothing of.
    """
    ending = event.status
    if event.stopped_by:
        ending += f" by {event.stopped_by}"
    if event.exit_code:
        ending += f" (exit code {event.exit_code})"
    if event.best_value is None:
        best = "no score yet"
    else:
        epoch = "" if event.best_epoch is None else f" in epoch {event.best_epoch}"
        best = f"best {event.best_metric or 'score'} {event.best_value:.4f}{epoch}"
    whole = ""
    if event.run_hours is not None and (event.run_cost is not None or event.run_hours * 3600 > event.seconds + 1):
        # Of one attempt without a price it would say the same twice
        whole = f", {hours_text(event.run_hours, event.run_cost)}"
    line = f"{ending} after {duration_text(event.seconds)}{whole}: {best}; run folder {event.run}"
    if event.resume_command:
        line += f"; go on with: {event.resume_command}{further}"
    return one_line(line)


def one_line(text: str) -> str:
    """The text on one line, without control characters: a file name must not move the cursor or colour the screen."""
    return "".join(" " if char.isspace() else char for char in text if char.isspace() or not _controls(char))


def _controls(char: str) -> bool:
    return unicodedata.category(char) == "Cc"

"""Owns how the figures of a watched run are written for a person: one line a subject, nothing where nothing is known."""

from __future__ import annotations

from typing import Any

from fasttrain.cli.figures import (
    device_text,
    duration_text,
    loss_text,
    one_line,
    rate_text,
    scientific_text,
    scores_text,
    share_text,
)
from fasttrain.telemetry.events import EpochEnded, ValidationFigures
from fasttrain.wording import counted

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_EPOCHS = 30
_QUIET_SECONDS = 90.0
"""A run that has said nothing for longer may hang, or be at a long validation: it is told."""


def lines_of(now: dict[str, Any]) -> list[tuple[str, str]]:
    """(subject, text) of everything that is known."""
    found = [
        ("run", now["run"]),
        ("status", status_text(now)),
        ("recipe", _recipe(now)),
        ("progress", progress_text(now)),
        ("loss", _loss(now)),
        ("scores", _scores(now)),
        ("best", best_text(now)),
        ("speed", speed_text(now)),
        ("GPU", _gpu(now)),
        ("time", _time(now)),
        ("cost", _cost(now)),
        ("limits", now["limits"]),
        ("folds", _folds(now)),
        ("go on with", now["resume_command"]),
    ]
    found += [("warning", warning) for warning in now["warnings"]]
    found += [("damaged", fault) for fault in now["faults"]]
    return [(subject, one_line(text)) for subject, text in found if text]


def status_text(now: dict[str, Any]) -> str:
    """`running, process 12 is alive; last sign of life 3 s ago`."""
    silent = now["seconds_since_last_sign"]
    if silent is None:
        return str(now["told"])
    told = f"{now['told']}; last sign of life {duration_text(silent)} ago"
    quiet = now["status"] == "running" and silent > _QUIET_SECONDS
    return f"{told}: it may hang, or be at work that takes long" if quiet else told


def progress_text(now: dict[str, Any]) -> str:
    """`epoch 3 of 40, step 210 of 2,800 (8%); validating: 3 of 20`."""
    parts = []
    if now["fold"] is not None:
        parts.append(f"fold {now['fold']['number']}, {(now['fold']['number'] or 0) + 1} of {now['fold']['folds']}")
    if now["epoch"] is not None:
        parts.append(f"epoch {now['epoch']}" + (f" of {now['epochs']}" if now["epochs"] else ""))
    if now["step"] is not None:
        share = f" of {now['steps']:,} ({now['step'] / now['steps']:.0%})" if now["steps"] else ""
        parts.append(f"step {now['step']:,}{share}")
    text = ", ".join(parts)
    work = now["under_way"]
    if work is None or (work["what"] == "training" and text):
        return text
    told = work["what"] + (f": {work['done']} of {work['total']}" if work["total"] else "")
    return f"{text}; {told}" if text else told


def best_text(now: dict[str, Any]) -> str:
    """`dice 0.8712 in epoch 12`."""
    best = now["best"]
    if best is None:
        return ""
    unit = " Gy" if "dose" in best["metric"] else ""
    epoch = f" in epoch {best['epoch']}" if best["epoch"] else ""
    return f"{best['metric'].removeprefix('val_').replace('_', ' ')} {best['value']:.4f}{unit}{epoch}"


def speed_text(now: dict[str, Any]) -> str:
    """`54.2 patches/s, waiting for data 3%`."""
    rate, share = now["patches_per_second"], now["wait_share"]
    parts = [rate_text(rate)] if rate is not None else []
    return ", ".join(parts + ([f"waiting for data {share_text(share)}"] if share is not None else []))


def short_line(now: dict[str, Any]) -> str:
    """Everything that changes, on one line, for where nothing can be redrawn."""
    left = now["seconds_left"]
    parts = [now["status"], progress_text(now), _loss(now).partition("  ")[0], best_text(now), speed_text(now)]
    parts += [f"left {duration_text(left)}" if left is not None else "", _cost(now)]
    return one_line("  ".join(part for part in parts if part))


def curve(values: list[float | None]) -> str:
    """The last epochs' losses as small bars, the highest of them the highest bar."""
    known = [value for value in values if value is not None and value == value and abs(value) != float("inf")]
    known = known[-_CURVE_EPOCHS:]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    if high == low:
        return _BARS[0] * len(known)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in known)


def _recipe(now: dict[str, Any]) -> str:
    return " on ".join(part for part in (now["recipe"], now["device"]) if part)


def _loss(now: dict[str, Any]) -> str:
    parts = []
    if now["loss"] is not None:
        parts.append(loss_text(now["loss"]))
    if now["train_loss"] is not None:
        parts.append(f"epoch's mean {loss_text(now['train_loss'])}")
    text = ", ".join(parts)
    if now["learning_rate"] is not None and text:
        text += f"  learning rate {scientific_text(now['learning_rate'])}"
    bars = curve(now["train_losses"])
    return f"{text}  {bars}" if bars else text


def _scores(now: dict[str, Any]) -> str:
    scores = now["scores"]
    if scores is None:
        return ""
    by_class: dict[str, dict[str, float | None]] = {"dice_by_class": {}, "dvh_by_structure": {}}
    for key in by_class:
        given = scores.get(key)
        by_class[key] = {str(name): _number(value) for name, value in given.items()} if isinstance(given, dict) else {}
    figures = ValidationFigures(
        dice=_number(scores.get("dice")),
        dice_by_class=by_class["dice_by_class"],
        dice_counts={},
        dose_score=_number(scores.get("dose_score")),
        dvh_score=_number(scores.get("dvh_score")),
        dvh_by_structure=by_class["dvh_by_structure"],
    )
    hd95 = _number(scores.get("hd95"))
    return f"{scores_text(figures)}{'' if hd95 is None else f'  hd95 {hd95:.1f} mm'}  (epoch {scores['epoch']})"


def _gpu(now: dict[str, Any]) -> str:
    gpu, card = now["gpu"], now["gpu"]["now"]
    told = gpu["told_by_run"]
    by_run = device_text(EpochEnded(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, told["utilisation"], told["gib"]))
    by_run = "" if by_run is None else f"by the run's last word {by_run.removeprefix('GPU ')}"
    if card is None:
        cpu = gpu["why_not"] == "the run is on the CPU"
        why = "" if gpu["why_not"] is None or cpu else f"now unknown: {gpu['why_not']}"
        return "; ".join(part for part in (by_run, why) if part)
    parts = []
    if card["utilisation"] is not None:
        parts.append(share_text(card["utilisation"]))
    if card["used_gib"] is not None:
        total = "" if card["total_gib"] is None else f" of {card['total_gib']:.1f}"
        parts.append(f"{card['used_gib']:.1f}{total} GiB")
    if card["watts"] is not None:
        limit = "" if card["limit_watts"] is None else f" of {card['limit_watts']:.0f}"
        parts.append(f"{card['watts']:.0f}{limit} W")
    if card["temperature"] is not None:
        parts.append(f"{card['temperature']:.0f} °C")
    return "; ".join(part for part in (f"now {', '.join(parts)}" if parts else "", by_run) if part)


def _time(now: dict[str, Any]) -> str:
    parts = [] if now["hours"] is None else [f"{duration_text(now['hours'] * 3600)} so far"]
    if now["attempts"] > 1 and now["fold"] is None and parts:
        parts[0] += f" in {counted(now['attempts'], 'attempt')}"
    if now["seconds_left"] is not None:
        left = duration_text(now["seconds_left"])
        parts.append(f"{left} left" if now["status"] == "running" else f"{left} were left")
    if now["hours_projected"] is not None:
        parts.append(f"in all {duration_text(now['hours_projected'] * 3600)}")
    return ", ".join(parts)


def _cost(now: dict[str, Any]) -> str:
    if now["cost"] is None:
        return ""
    parts = [f"{now['cost']:.2f} USD so far"]
    if now["cost_left"] is not None:
        parts.append(f"{now['cost_left']:.2f} left")
    if now["cost_projected"] is not None:
        parts.append(f"in all {now['cost_projected']:.2f}")
    price = "" if now["price_per_hour"] is None else f", at {now['price_per_hour']:g} an hour"
    return f"{', '.join(parts)}{price}"


def _folds(now: dict[str, Any]) -> str:
    return ", ".join(
        f"{fold['run']} {fold['status']}" + ("" if fold["best"] is None else f" {fold['best']:.4f}")
        for fold in now.get("folds", ())
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

"""Owns figures that a list, a report and a comparison of runs have in common: pace, machine, the name of a score."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from fasttrain.history.events_so_far import number, text
from fasttrain.history.standing import Standing


def pace_of(run: Standing) -> float | None:
    """Patches a second of the median epoch, of which the first counts only where there is no other: it may have compiled."""
    rates = [rate for row in run.rows if (rate := row.get("patches_per_second")) is not None]
    return median(rates[1:] or rates) if rates else None


def machine_of(environment: Mapping[str, Any]) -> str | None:
    """The kind of machine in a few words: the GPU, or the processor and how many of its CPUs."""
    name, device = text(environment, "hardware", "device_name"), text(environment, "hardware", "device") or ""
    cpus = number(environment, "hardware", "cpus")
    if name is None or device.startswith("cuda") or cpus is None:
        return name
    return f"{name}, {cpus:.0f} CPUs"


def score_name(metric: str) -> str:
    """`val_dose_score` as `dose score`."""
    return metric.removeprefix("val_").replace("_", " ")

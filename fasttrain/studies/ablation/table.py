"""Owns what an ablation leaves behind: its table as plain values, CSV, Markdown and a picture."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fasttrain.studies.ablation.ablate import Ablation
from fasttrain.studies.ablation.rows import FAST, PLAIN_ROW, Row
from fasttrain.telemetry.figure_file import save_figure
from fasttrain.whole_files import write_whole
from fasttrain.wording import counted

_GIB = 1 << 30
COLUMNS = (
    "setting",
    "patches_per_second",
    "lowest",
    "highest",
    "of_base",
    "base",
    "apart",
    "skipped",
    "memory_gib",
    "start_seconds",
    "trials",
    "note",
)
HEADINGS = ("setting", "patches/s", "lowest–highest", "of its base", "memory", "to the end of the first step", "note")


def records(study: Ablation) -> list[dict[str, Any]]:
    """A row a setting: rates in patches/s, `of_base` as a share of the median of the row it is held against."""
    bases = {row.name: row for row in study.rows}
    return [_record(row, bases[row.base], study.on_gpu) for row in study.rows if row.base in bases]


def _record(row: Row, against: Row, on_gpu: bool) -> dict[str, Any]:
    base, spread, held = against.rate, row.range, row.median("reserved_bytes" if on_gpu else "host_bytes")
    other = against.range
    apart = row is against or spread is None or other is None or spread[1] < other[0] or other[1] < spread[0]
    return {
        "setting": row.name,
        "patches_per_second": row.rate,
        "lowest": spread[0] if spread else None,
        "highest": spread[1] if spread else None,
        "of_base": row.rate / base if row.rate and base else None,
        "base": row.base,
        "apart": apart,
        "skipped": row.skipped,
        "memory_gib": held / _GIB if held else None,
        "start_seconds": row.start_seconds,
        "trials": len(row.rates),
        "note": row.note,
    }


def shown(record: Mapping[str, Any]) -> list[str]:
    """The cells of a row, under `HEADINGS`."""
    if record["patches_per_second"] is None:
        return [record["setting"], *["–"] * 5, record["note"]]
    share = "" if record["setting"] == record["base"] else f"{record['of_base']:.2f} of {record['base']}"
    share += "" if record["apart"] else ", within the spread"
    memory = "–" if record["memory_gib"] is None else f"{record['memory_gib']:.2f} GiB"
    return [
        record["setting"],
        _rate(record["patches_per_second"]),
        f"{_rate(record['lowest'])}–{_rate(record['highest'])}",
        share,
        memory,
        f"{record['start_seconds']:.1f} s",
        record["note"],
    ]


def shown_rows(study: Ablation) -> list[list[str]]:
    """The headings and the rows that were tried or left out for want of time."""
    return [list(HEADINGS), *(shown(record) for record in records(study) if not record["skipped"])]


def not_tried(study: Ablation) -> list[str]:
    """A sentence a reason why switches do not apply on this machine."""
    reasons: dict[str, list[str]] = {}
    for row in study.rows:
        if row.skipped:
            reasons.setdefault(row.note, []).append(row.name)
    return [f"not tried: {', '.join(names)} ({reason})" for reason, names in reasons.items()]


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def title_of(study: Ablation) -> str:
    """The recipe, the device and the versions that speed hangs on."""
    machine = study.machine
    cudnn = machine.get("cudnn")
    versions = f"torch {machine.get('torch')}" + (f", cuDNN {cudnn}" if cudnn and study.on_gpu else "")
    cpus = counted(int(machine.get("cpus") or 0), "CPU")
    return f"{study.resolved.recipe.name} on {machine.get('device_name')} with {cpus}, {versions}"


def markdown(study: Ablation) -> str:
    """The table as Markdown, with what it holds for above it."""
    heading, *rows = shown_rows(study)
    lines = [f"`fasttrain ablate`: {title_of(study)}", "", _line(heading), _line(["---"] * len(heading))]
    lines += [_line(row) for row in rows]
    foot = [*not_tried(study), *left_out(study)]
    return "\n".join([*lines, "", caption(study), "", *(f"{sentence}  " for sentence in foot), ""])


def left_out(study: Ablation) -> list[str]:
    """Which budget would have had room for all, where the time was over before."""
    needed = study.needed()
    if needed is None:
        return []
    seconds, what = needed
    budget = f"{math.ceil(seconds / 60)}m" if seconds > 120 else f"{math.ceil(seconds / 10) * 10}s"
    return [f"`--budget {budget}` would have had room for {what}, by what the trials took here"]


def caption(study: Ablation) -> str:
    """What the columns mean, in a sentence or two."""
    held = "what a step holds of the GPU" if study.on_gpu else "the most that the trial's process held"
    return (
        "Rates are medians of trials in turns, each in a process of its own, beside the slowest and the fastest stretch of all; "
        f"memory is {held}. The time to the first step is the first trial's, without imports and with a part of the cases."
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_tables(study: Ablation, folder: Path) -> None:
    """Writes ablate.csv and ablate.md whole; raises StorageError where they cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(study))
    for name, content in (("ablate.csv", text.getvalue()), ("ablate.md", markdown(study))):
        with write_whole(folder / name) as stream:
            stream.write(content.encode())


def draw(study: Ablation, folder: Path) -> Path | None:
    """Writes ablate.png, a bar a setting with its range; None where nothing was measured."""
    rows = [row for row in study.rows if row.rate]
    if not rows:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    rates = [row.rate or 0.0 for row in rows]
    ranges = [row.range or (rate, rate) for row, rate in zip(rows, rates, strict=True)]
    around = [
        [max(rate - low, 0.0) for rate, (low, _) in zip(rates, ranges, strict=True)],
        [max(high - rate, 0.0) for rate, (_, high) in zip(rates, ranges, strict=True)],
    ]
    colours = [
        "C2" if row.name == FAST else "C3" if row.name == PLAIN_ROW else "C0" if row.base == FAST else "C1"
        for row in rows
    ]
    axes.barh(places, rates, xerr=around, color=colours, capsize=3)
    axes.set_yticks(
        places, labels=[row.name if row.name == row.base else f"{row.name}, from {row.base}" for row in rows]
    )
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("patches/s")
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_title(title_of(study), fontsize=9)
    return save_figure(figure, folder / "ablate.png")


def document(study: Ablation) -> dict[str, Any]:
    """All of it for JSON."""
    return {
        "recipe": study.resolved.recipe.name,
        "machine": study.machine,
        "title": title_of(study),
        "plan": {key: value for key, value in study.facts.items() if key not in ("on_gpu", "reasons")},
        "ended": study.ended,
        "seconds_for_all": None if (needed := study.needed()) is None else needed[0],
        "rows": [
            {**record, "changed": dict(row.changed), "rates": row.rates}
            for record, row in zip(records(study), study.rows, strict=True)
        ],
    }

"""Owns the section of a report about single cases: the worst and the best in three planes, and the scores of all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fasttrain.history.events_so_far import number, text
from fasttrain.history.page import paragraph, picture, section, table
from fasttrain.history.standing import KILLED, RUNNING, Standing
from fasttrain.run_folder import RunFolder

_PICTURE = re.compile(r"^epoch_(\d+)_(worst|median|best|only)_(.*)\.png$", re.DOTALL)
_ROLES = ("worst", "best", "only", "median")
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_PICTURE_BYTES = 16 << 20


def cases_section(run: Standing, shown: Sequence[Standing]) -> str:
    """The worst and the best case in three planes, and the scores of every case, the worst first."""
    pictures = [one for part in shown for one in _pictures(part, len(shown) > 1)]
    cases = run.summary.get("cases")
    found = (
        {str(case): scores for case, scores in cases.items() if isinstance(scores, dict)}
        if isinstance(cases, dict)
        else {}
    )
    columns = list(dict.fromkeys(str(name) for scores in found.values() for name in scores))
    dose = "dose_score" in columns
    # No mean of ours where the run's own figure says it
    header = ("case", *(() if dose else ("mean",)), *columns)
    order = sorted(found, key=lambda case: _goodness(found[case], dose))
    rows = [
        (
            case,
            *(() if dose else (_score(_mean(found[case])),)),
            *(_score(number(found[case], name)) for name in columns),
        )
        for case in order
    ]
    return section(
        "Cases",
        paragraph(_which_scores(run, len(shown) > 1), "note") if rows else "",
        *pictures,
        "" if pictures else paragraph(_why_no_pictures(run), "note"),
        table(header, rows, numbers_from=1),
        paragraph("– : the class is neither in the label nor in the prediction, so that it is not counted.", "note")
        if rows and not dose
        else "",
        _skipped(shown[-1]),
    )


def _pictures(run: Standing, several: bool) -> list[str]:
    """Those of the newest epoch that has any, the worst case first."""
    folder = RunFolder(run.path).pictures
    found: dict[tuple[int, str], tuple[Path | None, str]] = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if (match := _PICTURE.match(path.name)) is not None:
                found[(int(match[1]), match[2])] = (path, match[3])
    newest = max((epoch for epoch, _ in found), default=0)
    drawn = []
    for role in _ROLES:
        drawing, case = found.get((newest, role), (None, ""))
        if (png := _png(drawing)) is not None:
            fold = f"{run.path.name}, " if several else ""
            drawn.append(picture(png, f"{fold}{role} case of epoch {newest}: {case}"))
    return drawn


def _png(path: Path | None) -> bytes | None:
    try:
        if path is None or path.stat().st_size > _MOST_PICTURE_BYTES:
            return None
        found = path.read_bytes()
    except OSError:
        return None
    return found if found.startswith(_PNG) else None


def _why_no_pictures(run: Standing) -> str:
    kept = run.plan.get("recipe")
    wanted = text(kept, "output", "pictures") if isinstance(kept, dict) else None
    if wanted == "off":
        return "No case was drawn: the recipe has output.pictures: off."
    if run.status == RUNNING:
        return "No case was drawn yet: that is done after the last validation."
    if run.status in (KILLED, "stopped", "failed"):
        return "No case was drawn before the run ended: that is done after its last validation."
    return "The run folder holds no pictures of cases."


def _which_scores(run: Standing, several: bool) -> str:
    if several:
        return "Scores of each case by the one network that never saw it, worst first."
    of_last = max(
        (int(row["epoch"] or 0) for row in run.rows if run.metric and row.get(run.metric) is not None), default=0
    )
    best = "" if run.best is None or run.best[2] == of_last else f"; best.pt is that of epoch {run.best[2]}"
    return f"Scores of each case at the last validation, worst first{f' (epoch {of_last}{best})' if of_last else ''}."


def _goodness(scores: Mapping[str, Any], dose: bool) -> float:
    """By which the worst case comes first; those without a score come last."""
    value = number(scores, "dose_score") if dose else _mean(scores)
    return float("inf") if value is None else -value if dose else value


def _mean(scores: Mapping[str, Any]) -> float | None:
    values = [value for name in scores if (value := number(scores, name)) is not None]
    return fmean(values) if values else None


def _skipped(run: Standing) -> str:
    skipped = run.summary.get("skipped_cases") or run.plan.get("skipped_cases")
    if not isinstance(skipped, dict) or not skipped:
        return ""
    rows = [
        (str(case), "; ".join(map(str, faults)) if isinstance(faults, list) else str(faults))
        for case, faults in skipped.items()
    ]
    return "<h3>Left out as faulty</h3>" + table(("case", "fault"), rows)


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

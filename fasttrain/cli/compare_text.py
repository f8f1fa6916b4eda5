"""Owns how two compared runs are printed: a table a part, A and B side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fasttrain.cli.figures import one_line
from fasttrain.cli.printing import print_table

if TYPE_CHECKING:
    from fasttrain.studies.comparing import Comparison, Difference

_WIDEST = 48


def print_comparison(comparison: Comparison, drawn: Path | None) -> None:
    """What differs, part by part; of the result all key figures."""
    print(one_line(f"A  {comparison.a.path}"))
    print(one_line(f"B  {comparison.b.path}"))
    for note in comparison.notes:
        print(one_line(f"note: {note}"))
    _print_part("recipe", comparison.recipe, "the same values")
    _print_part("plan", comparison.plan, "the same decisions")
    _print_part("machine", comparison.machine, "the same")
    _print_part("result", comparison.result, "neither has one")
    print(f"curves: {drawn}" if drawn is not None else "no curves: neither run has closed an epoch")


def _print_part(name: str, differences: list[Difference], none: str) -> None:
    print(name if differences else f"{name}: {none}")
    rows: list[tuple[str, ...]] = [("", "A", "B", "B - A")] if name == "result" else [("", "A", "B")]
    for one in differences:
        cells = (one.key, _shown(one.a), _shown(one.b))
        rows.append((*cells, _change(one.a, one.b)) if name == "result" else cells)
    if differences:
        print_table([tuple(one_line(cell) for cell in row) for row in rows], indent="  ")


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    text = str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def _change(a: Any, b: Any) -> str:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (a, b))
    return f"{b - a:+.4g}" if numbers else ""

"""Owns line charts as SVG text, which lies inside a page: drawn in milliseconds, sharp at any size, by no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = (
    *("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22"),
    *("#0b2e4f", "#7d0f10", "#0d4d0d", "#9c4a00", "#3f2363", "#0a6670", "#3e221c", "#8a2f72", "#3a3a3a", "#5f6011"),
)
_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 36
_MOST_MARKERS = 60
_MOST_POINTS = 2000
_MOST_NAMED = 20
_ABOVE = 0.04
_MOST = 1e100
"""Beyond it differences of values are no longer finite."""


@dataclass(frozen=True)
class Series:
    """A line: `points` are (x, y) in order of x; `wide` marks the one that counts most."""

    name: str
    points: Sequence[tuple[float, float]]
    wide: bool = False


def chart(title: str, series: Sequence[Series], x_name: str = "epoch", from_zero: bool = False) -> str:
    """The SVG of some lines with axes and a legend; empty where no series has a finite point."""
    lines = [Series(one.name, _thinned(_finite(one.points)), one.wide) for one in series]
    lines = [one for one in lines if one.points]
    if not lines:
        return ""
    xs = [x for one in lines for x, _ in one.points]
    ys = [y for one in lines for _, y in one.points] + ([0.0] if from_zero else [])
    low, high = _widened(min(ys), max(ys))
    frame = _Frame(_widened(min(xs), max(xs)), (low, high + (high - low) * _ABOVE))
    parts = [*frame.grid(x_name), *(_line(one, index, frame) for index, one in enumerate(lines))]
    drawing = "".join(parts)
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f"{drawing}</svg>"
    )
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{svg}{_legend(lines)}</figure>'


class _Frame:
    """Where values lie in the drawing."""

    def __init__(self, across: tuple[float, float], up: tuple[float, float]) -> None:
        self.across, self.up = across, up

    def place(self, x: float, y: float) -> tuple[float, float]:
        (left, right), (low, high) = self.across, self.up
        return (
            _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    def grid(self, x_name: str) -> list[str]:
        parts = []
        for value in _ticks(*self.up, 5):
            _, y = self.place(self.across[0], value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick_text(value)}</text>')
        for value in _ticks(*self.across, 8, least=1.0):
            x, _ = self.place(value, self.up[0])
            parts.append(
                f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_tick_text(value)}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(x_name)}</text>')
        return parts


def _line(one: Series, index: int, frame: _Frame) -> str:
    colour, width = COLOURS[index % len(COLOURS)], 2.4 if one.wide else 1.3
    places = [frame.place(x, y) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{path}"/>'
    if len(places) > _MOST_MARKERS:
        return drawn
    # A line of one point would not be seen; and what a marker stands for is told where the pointer rests on it
    return drawn + "".join(
        f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{1.2 * width:.1f}"><title>{escape(one.name)}: {value:.5g} at '
        f"{at:g}</title></circle>"
        for (x, y), (at, value) in zip(places, one.points, strict=True)
    )


def _legend(lines: Sequence[Series]) -> str:
    named = [
        f'<span><i style="background:{COLOURS[index % len(COLOURS)]}"></i>{escape(one.name)}</span>'
        for index, one in enumerate(lines[:_MOST_NAMED])
    ]
    more = len(lines) - _MOST_NAMED
    return f'<div class="legend">{"".join(named)}{f"<span>and {more} more</span>" if more > 0 else ""}</div>'


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if abs(x) < _MOST and abs(y) < _MOST]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of very many points as many as can be seen, the last one always among them."""
    step = -(-len(points) // _MOST_POINTS)
    return points if step <= 1 else [*points[:-1:step], points[-1]]


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is never empty, also where its numbers are so large that one more changes nothing."""
    if high > low:
        return low, high
    room = max(abs(low) * 0.01, 0.5)
    return low - room, low + room


def _ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Round numbers between the two, which lie `least` apart or more."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = max(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999), least)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [count * step for count in range(first, min(last, first + 4 * most) + 1)]


def _tick_text(value: float) -> str:
    return escape(f"{value:.4g}")

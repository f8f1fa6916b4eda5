"""Owns the picture of a sweep: throughput, and on a GPU memory, against the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fasttrain.studies.sweep import Point
from fasttrain.telemetry.figure_file import save_figure

_GIB = 1 << 30


def draw_sweep(
    points: Sequence[Point], chosen: Point | None, path: Path, title: str, gpu_bytes: int | None
) -> Path | None:
    """Writes the PNG and returns its path; None where nothing was measured. Raises StorageError where it cannot be written."""
    measured = sorted((point for point in points if point.rate), key=lambda point: (point.compiled, point.batch_size))
    if not measured:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.add_subplot()
    for compiled, name in ((False, "throughput"), (True, "throughput, compiled")):
        line = [point for point in measured if point.compiled == compiled]
        if line:
            sizes, rates = [point.batch_size for point in line], [point.rate for point in line]
            bars = [point.spread * point.rate for point in line]
            axes.errorbar(sizes, rates, yerr=bars, marker="o", capsize=3, color=f"C{int(compiled)}", label=name)
    if chosen is not None:
        axes.plot(
            [chosen.batch_size], [chosen.rate], "o", markersize=13, fillstyle="none", color="black", label="chosen"
        )
    axes.set_xlabel("batch size (patches a forward pass)")
    axes.set_ylabel("patches/s")
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    every = sorted({point.batch_size for point in points})
    axes.set_xticks(every, labels=[str(size) for size in every])
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    axes.set_title(title, fontsize=10)
    held = [(point.batch_size, point.values.get("reserved_bytes")) for point in measured if not point.compiled]
    known = [(size, count / _GIB) for size, count in held if count]
    if known:
        memory = axes.twinx()
        memory.plot(*zip(*known, strict=True), marker="s", linestyle="--", color="C2", label="memory held")
        memory.set_ylabel("GiB")
        memory.set_ylim(0, gpu_bytes / _GIB if gpu_bytes else None)
        memory.legend(fontsize=8, loc="lower right")
    for point in points:
        if not point.rate:
            axes.axvline(point.batch_size, color="C3", linestyle=":", linewidth=1.2)
            axes.text(point.batch_size, 0, f" {point.reason}", rotation=90, fontsize=7, va="bottom", color="C3")
    axes.legend(fontsize=8, loc="lower left")
    return save_figure(figure, path)

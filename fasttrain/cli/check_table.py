"""Owns what `check` prints for a person: the table of cases, faults and warnings after it, and the figures."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fasttrain.cli.figures import one_line
from fasttrain.cli.printing import print_table
from fasttrain.data.checking import CaseFindings, Checked, remaining_text
from fasttrain.data.checking.alike import shared_faults
from fasttrain.data.checking.report import Figures, figures_of
from fasttrain.data.splits import Split
from fasttrain.recipe.data_spec import FoldersSource
from fasttrain.wording import size_in_memory

_MOST_UNDECLARED = 8
_HEAD = ("case", "shape", "label", "spacing mm", "axes", "types", "intensity", "voxels by class", "faults")


def print_check(checked: Checked, split: Split | None = None) -> None:
    """On a terminal a table that fits its width, elsewhere aligned plain lines; then faults, warnings and figures as lines."""
    rows = [tuple(map(one_line, _row(case, checked.terms.data.channels))) for case in checked.cases]
    if sys.stdout.isatty():
        _print_rich(rows)
    else:
        print_table([_HEAD, *rows])
    for fault in checked.faults:
        print(f"fault: {one_line(fault)}")
    for line in shared_faults(checked.cases):
        print(f"faults alike in {one_line(line)}")
    if checked.bad and split is not None and checked.terms.data.bad_cases == "skip":
        print(one_line(remaining_text(checked, split)))
    for warning in checked.warnings:
        print(f"warning: {one_line(warning)}")
    figures = figures_of(checked)
    print()
    below = [_layout_row(checked), *(_figure_rows(figures, checked) if figures is not None else ())]
    print_table([(title, one_line(text)) for title, text in below])
    bad = len(checked.bad)
    verdict = f"{_many(bad, 'case')} with faults" if bad else "no case has a fault"
    if not bad and checked.set_faults:
        verdict = "the set has a fault"
    print(
        f"{_many(len(checked.cases), 'case')}, {_many(checked.files, 'file')} ({checked.files_read} read, "
        f"{checked.files - checked.files_read} unchanged since an earlier check): {verdict}"
    )


def _layout_row(checked: Checked) -> tuple[str, str]:
    data, source = checked.terms.data, checked.terms.data.source
    where = ""
    if isinstance(source, FoldersSource):
        inner = "CASE/" if source.case_folders else ""
        images, labels = (
            f"{source.images}/{inner}CASE{'|'.join(source.image_suffixes)}",
            f"{source.labels}/{inner}CASE{source.label_suffix}",
        )
        where = f" ({images} with {labels})"
    return "layout", f"{source.kind}{where}, {_many(len(data.channels), 'channel')}: {', '.join(data.channels)}"


def _row(case: CaseFindings, channels: Sequence[str]) -> tuple[str, ...]:
    shape = None if case.grid is None else case.grid.shape
    label = "–" if case.label_shape is None else _sizes(case.label_shape)
    types = "/".join(case.dtypes) or "–"
    return (
        case.case.name,
        "–" if shape is None else _sizes(shape),
        "same" if shape is not None and case.label_shape == shape else label,
        "–" if case.spacing is None else "×".join(f"{one:.4g}" for one in case.spacing),
        case.orientation or "–",
        f"{types}, {case.label_dtype or '–'}",
        _intensity_text(case, channels),
        _voxels_text(case),
        str(len(case.faults)) if case.faults else "",
    )


def _intensity_text(case: CaseFindings, channels: Sequence[str]) -> str:
    texts = ["–" if one is None else f"{one[0]:.5g} … {one[1]:.5g}" for one in case.ranges]
    if len(texts) < 2:
        return texts[0] if texts else "–"
    names = channels if len(channels) == len(texts) else range(len(texts))
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def _voxels_text(case: CaseFindings) -> str:
    if case.voxels is None:
        return "–"
    parts = [] if case.empty else [f"{value}: {count:,}" for value, count in case.voxels.items() if value]
    strange = case.undeclared or {}
    parts += [f"undeclared {value}: {count:,}" for value, count in list(strange.items())[:_MOST_UNDECLARED]]
    if len(strange) > _MOST_UNDECLARED:
        parts.append(f"and {_many(len(strange) - _MOST_UNDECLARED, 'value')} more")
    if case.ignored:
        parts.append(f"ignored: {case.ignored:,}")
    if case.empty and not strange and not case.all_ignored:
        parts.insert(0, "no class" if case.faults else "background alone")
    return "  ".join(parts)


def _print_rich(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in _HEAD:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row), style="red" if row[-1] else None)
    Console(no_color=bool(os.environ.get("NO_COLOR")), highlight=False).print(table)


def _figure_rows(figures: Figures, checked: Checked) -> list[tuple[str, str]]:
    terms = checked.terms
    names = terms.data.classes
    classes = [
        f"{value} {names[value]} ({_share_text(count, figures)}, in {_many(figures.cases_by_value.get(value, 0), 'case')})"
        for value, count in figures.voxels_by_value.items()
        if value
    ]
    name, smallest = figures.smallest
    patch = terms.recipe.patch.size if terms.recipe is not None else None
    against = ""
    if patch is not None:
        against = (
            f"; patch {_sizes(patch)}, longer than the volume along an axis in {_many(figures.below_patch, 'case')}"
        )
    shape = f"median {_floats(figures.median_shape)} voxels of {_floats(figures.median_spacing)} mm"
    if terms.data.spacing is not None:
        shape += f"; {_floats(figures.resampled_median_shape)} after resampling to {_floats(terms.data.spacing)} mm"
    if terms.data.slices is not None:
        shape += f"; cut into slices ({terms.data.slices.axis}) of {_floats(figures.resampled_median_shape[1:])}"
    share = "–" if figures.foreground_share is None else f"{figures.foreground_share:.3%} of all voxels"
    return [
        ("volumes", shape),
        ("foreground", share),
        ("classes", ", ".join(classes) or "none"),
        ("smallest", f"{_sizes(smallest)} ({name}){against}"),
        (
            "cache",
            f"{_bytes(figures.memory_bytes)} in memory and on the disk, {_bytes(figures.gpu_bytes)} on a GPU with 16-bit images"
            f"{', before foreground crops' if terms.data.crop_foreground is not None else ''}",
        ),
    ]


def _share_text(count: int, figures: Figures) -> str:
    """`1.2%` of the foreground."""
    total = sum(number for value, number in figures.voxels_by_value.items() if value)
    return f"{count / total:.1%} of it" if total else "none"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _sizes(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _floats(values: Sequence[float]) -> str:
    return "×".join(f"{value:.4g}" for value in values)


def _bytes(count: int) -> str:
    return size_in_memory(count) if count >= 10 << 20 else f"{count / (1 << 20):,.1f} MiB"

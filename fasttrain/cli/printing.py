"""Owns what goes to stdout: documents and plain tables."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fasttrain.cli.figures import estimate_text
from fasttrain.telemetry.strict_json import plain
from fasttrain.whole_files import without_half_pairs
from fasttrain.wording import counted, size_in_memory

if TYPE_CHECKING:
    from fasttrain.engine.run import Prepared
    from fasttrain.history.estimate import Estimate


def print_json(document: Any) -> None:
    """One JSON document, its numbers finite; where stdout cannot hold a character of it, with JSON's own escapes."""
    text = without_half_pairs(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        # The stream's own escapes (\xfc) are none that JSON knows
        text = json.dumps(document, indent=2, allow_nan=False)
    print(text)


def tell(sentence: str) -> None:
    """A line on stderr. Where that is full, or nobody reads it, what is told is lost and the exit code is not."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, file=sys.stderr, flush=True)


def print_table(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Rows in aligned columns, the last one as long as it likes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=False)]
        print(indent + "  ".join([*cells, row[-1]]).rstrip())


def print_plan(prepared: Prepared, as_json: bool, expected: Estimate | str) -> None:
    """The plan of a dry run, and what the run is expected to take or why that is not known."""
    plan, recipe = prepared.plan, prepared.recipe
    if as_json:
        names = {"training": prepared.split.train, "validation": prepared.split.validation, "test": prepared.split.test}
        cases = {part: [case.name for case in inside] for part, inside in names.items()}
        print_json(
            {
                "recipe": recipe.name,
                "data": str(prepared.root),
                **plan.record(),
                "outline": prepared.outline.text,
                "parameters": prepared.outline.parameters,
                "cases": cases,
                "skipped_cases": prepared.skipped,
                "estimate": None if isinstance(expected, str) else plain(expected.record()),
                "estimate_told": estimate_text(expected),
            }
        )
        return
    sizes = plan.sizes
    patch = "×".join(map(str, recipe.patch.size))
    channels, classes = (
        counted(len(recipe.data.channels), "channel"),
        counted(len(recipe.data.classes), "structure")
        if recipe.task == "dose"
        else f"{counted(recipe.data.class_count, 'class', 'classes')} with background",
    )
    regions = f" in regions: {', '.join(recipe.data.regions)}" if recipe.data.regions else ""
    print(f"recipe {recipe.name}, data {prepared.root}")
    print_table(
        [
            ("cases", f"{sizes.training_cases} training, {sizes.validation_cases} validation, {sizes.test_cases} test"),
            ("patch", f"{patch}, {channels}, {classes}{regions}"),
            ("network", prepared.outline.text),
            (
                "batch",
                f"{counted(sizes.batch_size, 'patch', 'patches')} a forward pass × "
                f"{counted(sizes.accumulate, 'pass', 'passes')} a step = {sizes.effective_batch}; "
                f"{counted(sizes.samples_per_case, 'patch', 'patches')} a case",
            ),
            ("steps", f"{sizes.steps_per_epoch} an epoch × {counted(sizes.epochs, 'epoch')} = {sizes.total_steps}"),
            ("cache", f"{size_in_memory(sizes.cache_bytes)} of preprocessed volumes"),
        ]
    )
    print_table([("time", estimate_text(expected))])
    print("decisions")
    print_table([(one.name, one.value, one.reason) for one in plan.decisions], indent="  ")

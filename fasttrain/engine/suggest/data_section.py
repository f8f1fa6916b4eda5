"""Owns the `data` section of a suggested recipe: every value with the rule and the finding that gave it beside it."""

from __future__ import annotations

import numpy as np

from fasttrain.data.fingerprint import Fingerprint, Window
from fasttrain.engine.suggest.commented_yaml import comment, number, numbers, quoted, section
from fasttrain.engine.suggest.planner import SuggestedPlan
from fasttrain.recipe.data_spec import FoldersSource
from fasttrain.wording import counted

_FOLDS = 5
_NONZERO_SHARE = 0.75
_TABLE = 40


def data_section(found: Fingerprint, plan: SuggestedPlan, window: Window | None) -> str:
    layout = found.layout
    lines = [f"  source: {_source(found)}", f"  channels: [{', '.join(quoted(one) for one in layout.channels)}]"]
    lines += _classes(found)
    if layout.ignore_label is not None:
        lines += [
            comment("The data set calls this value 'ignore': its voxels are left out of losses and scores."),
            f"  ignore_label: {layout.ignore_label}",
        ]
    lines += _split(len(found.cases))
    if layout.dimensions == 3:
        lines.append("  orientation: RAS")
    lines += [comment(_about_spacing(found, plan)), f"  spacing: {numbers(plan.spacing)}"]
    lines += _intensity(found, window)
    if found.non_finite:
        lines += [
            comment(
                f"{counted(len(found.non_finite), 'case')} with NaN or infinite voxels (the first: "
                f"{found.non_finite[0]}); they are filled with the "
                "channel's minimum. Better is to mend the files and take this line out."
            ),
            "  nan_policy: replace",
        ]
    return section("data", *lines)


def _source(found: Fingerprint) -> str:
    source = found.layout.source
    if not isinstance(source, FoldersSource):
        return f"{{kind: {source.kind}}}"
    suffixes = ", ".join(quoted(one) for one in source.image_suffixes)
    return (
        f"{{kind: folders, images: {quoted(source.images)}, labels: {quoted(source.labels)}, image_suffixes: [{suffixes}], "
        f"label_suffix: {quoted(source.label_suffix)}{', case_folders: true' if source.case_folders else ''}}}"
    )


def _classes(found: Fingerprint) -> list[str]:
    voxels, cases, total = found.voxels_by_value, found.cases_by_value, len(found.cases)
    lines = [comment("Label values found, with their voxels a case that has them."), "  classes:"]
    for value, name in found.classes.items():
        if value in voxels:
            note = f"{voxels[value] / cases[value]:,.0f} voxels, in {cases[value]} of {total} cases"
        else:
            note = "named by the data set, but in no label"
        entry = f"    {value}: {quoted(name)}"
        lines.append(f"{entry.ljust(_TABLE)}  # {note}")
    return lines


def _split(count: int) -> list[str]:
    if count == 1:
        return [
            comment(
                "There is one case, which trains and validates: its score says nothing about other cases. With more cases "
                "write {kind: kfold, folds: 5}."
            ),
            "  split: {kind: same}",
        ]
    if count < _FOLDS:
        about = f"{count} cases: each validates once; five folds need five cases."
    else:
        about = f"{count} cases in nnU-Net's five folds, the first of which validates."
    return [comment(about), f"  split: {{kind: kfold, folds: {min(count, _FOLDS)}, fold: 0}}"]


def _about_spacing(found: Fingerprint, plan: SuggestedPlan) -> str:
    unit = "mm; the median of each axis"
    if plan.coarse_axis is not None:
        low = found.spacings[:, plan.coarse_axis].min()
        return (
            f"{unit}, but for axis {plan.coarse_axis}: its median is over 3 times all others and it has few voxels, so the tenth "
            f"percentile (nnU-Net's rule for coarse axes; the finest is {low:.4g} mm)."
        )
    worst, best = max(plan.spacing), min(plan.spacing)
    return (
        f"{unit} (the coarsest is {worst / best:.3g} times the finest; from 3 times on an axis is treated as coarse)."
    )


def _intensity(found: Fingerprint, window: Window | None) -> list[str]:
    if window is not None:
        by = "named CT" if found.layout.named_channels else "the values look like Hounsfield units"
        return [
            comment(f"CT ({by}): the 0.5 and 99.5 percentiles of the labelled voxels, mapped to 0…1."),
            f"  intensity: {{kind: window, low: {number(window.low)}, high: {number(window.high)}}}",
        ]
    box = float(np.median([case.nonzero_share for case in found.cases]))
    nonzero = box < _NONZERO_SHARE
    low, high = min(case.maximum for case in found.cases), max(case.maximum for case in found.cases)
    about = (
        f"{'Labelled CT voxels have one value, so no window' if found.is_ct else 'Not CT'}: each image is normalised by itself "
        f"(their maxima run from {low:.4g} to {high:.4g}). The box of voxels that are not 0 holds {box:.0%} of a median volume; "
        "below 75% zeros are background and are left out."
    )
    return [comment(about), f"  intensity: {{kind: zscore, nonzero: {str(nonzero).lower()}}}"]

"""Owns what a recipe's task demands of its sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fasttrain.recipe.data_spec import OpenKBPSource, ProvidedSplit
from fasttrain.recipe.names import did_you_mean
from fasttrain.recipe.network_spec import DoseUNetSpec, Fault
from fasttrain.recipe.task import MOST_STRUCTURES, OPENKBP_STRUCTURES

if TYPE_CHECKING:
    from fasttrain.recipe.recipe import Recipe


def faults_of_task(recipe: Recipe) -> Iterator[Fault]:
    """What is wrong with a recipe for its task, and for doses in a recipe for another."""
    data, dose = recipe.data, recipe.task == "dose"
    known = recipe.task_facts.losses
    if recipe.loss.kind not in known:
        yield (
            ("loss", "kind"),
            f"{recipe.loss.kind} is no loss of task: {recipe.task}; use one of {', '.join(sorted(known))}",
        )
    if dose != isinstance(data.source, OpenKBPSource):
        needed = "openkbp" if dose else "one of labels"
        yield (
            ("data", "source", "kind"),
            f"is {data.source.kind}, but task: {recipe.task} takes {needed}; change one of the two",
        )
    if isinstance(data.split, ProvidedSplit) and not isinstance(data.source, OpenKBPSource):
        yield (
            ("data", "split", "kind"),
            f"provided is for data.source.kind: openkbp, and that is {data.source.kind}; use another",
        )
    if not dose:
        if data.dose_scale != type(data).model_fields["dose_scale"].default:
            yield ("data", "dose_scale"), "is for task: dose; leave it out"
        if isinstance(recipe.network, DoseUNetSpec):
            yield ("network", "kind"), "dose_unet is for task: dose; use dynunet, or another"
        return
    if recipe.dimensions != 3:
        yield ("patch", "size"), f"has {recipe.dimensions} values, and doses are volumes; give 3"
    if len(data.channels) != 1:
        yield ("data", "channels"), f"are {len(data.channels)}, and an OpenKBP patient has one, the CT"
    if sorted(data.classes) != list(range(1, len(data.classes) + 1)) or len(data.classes) > MOST_STRUCTURES:
        yield ("data", "classes"), f"of task: dose are numbered from 1 on without gaps, at most {MOST_STRUCTURES}"
    for value, name in data.classes.items():
        if name not in OPENKBP_STRUCTURES:
            yield (
                ("data", "classes", value),
                f"{name!r} is no structure of OpenKBP{did_you_mean(name, OPENKBP_STRUCTURES)}",
            )
    for key in ("label_map", "regions", "ignore_label"):
        if getattr(data, key) not in (None, {}):
            yield (
                ("data", key),
                "is for labels of class values, and task: dose has structures that overlap; leave it out",
            )
    if recipe.validation.hd95:
        yield ("validation", "hd95"), "is a distance of classes, and a dose has none; leave it out"
    yield from _faults_of_sides(recipe)


def _faults_of_sides(recipe: Recipe) -> Iterator[Fault]:
    """A mirrored patient whose left organ has no right one to become is a wrong patient."""
    flip, axis, names = recipe.augment.flip, recipe.left_right_axis, recipe.data.class_names
    mirrored = axis is not None and ((flip is not None and axis in flip.axes) or axis in recipe.validation.mirror)
    for value, name in zip(sorted(recipe.data.classes), names, strict=True):
        side, other = ("Left", "Right") if name.startswith("Left") else ("Right", "Left")
        partner = f"{other}{name.removeprefix(side)}"
        if mirrored and name.startswith(side) and partner not in names:
            yield (
                ("data", "classes", value),
                f"{name} has no partner {partner} that it could change places with in patches mirrored along axis {axis}; add "
                f"{partner}, or take axis {axis} out of augment.flip.axes and validation.mirror",
            )

"""Owns the text of a suggested recipe: every value with the rule and the finding that gave it beside it."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from fasttrain.data.fingerprint import Fingerprint, Window
from fasttrain.engine.suggest.commented_yaml import comment, line, numbers, quoted, section, size_text
from fasttrain.engine.suggest.data_section import data_section
from fasttrain.engine.suggest.planner import (
    CPU_GIB,
    DATA_SHARE,
    ELEMENTS_AT_8_GIB,
    MOST_GIB,
    USED_SHARE,
    SuggestedPlan,
)

_NOISE = 0.1


def recipe_text(name: str, data: Path, target: Path, found: Fingerprint, plan: SuggestedPlan) -> str:
    """The YAML of a whole recipe; `data` and the file `target` are only named in the comment at its top."""
    mirrored = found.mirror_axes
    window = found.window if found.is_ct else None
    parts = [
        _heading(data, target, found, plan),
        f"name: {quoted(name)}\ntask: segmentation",
        data_section(found, plan, window),
        _patch(found, plan),
        _augment(found, plan, window, mirrored),
        _network(plan),
        _optimisation(plan),
        _training(found, plan),
        _validation(plan, mirrored),
    ]
    return "\n\n".join(parts) + "\n"


def _heading(data: Path, target: Path, found: Fingerprint, plan: SuggestedPlan) -> str:
    device = f"a GPU of {plan.gpu_gib:.4g} GiB" if plan.gpu_gib else "a CPU"
    count = len(found.cases)
    text = (
        f"Suggested by `fasttrain recipes suggest` for {device}, from {count} case{'s' * (count != 1)} in {data}, by the "
        "rules of nnU-Net's planner (Isensee et al., Nature Methods 2021). Beside each value stand the rule and what was found."
    )
    recipe = str(target)
    command = f"fasttrain train --recipe {shlex.quote(recipe)} --data {shlex.quote(str(data))}"
    lines = [comment(text, 0), line(f"Train it: {command}")]
    spacings, shapes = found.spacings, found.shapes
    lines.append(
        comment(
            f"Found: volumes of {_range(shapes)} voxels (median {size_text(np.median(shapes, axis=0).tolist())}) with a spacing "
            f"of {_range(spacings)} mm; {found.foreground_share:.2%} of all voxels are labelled. "
            f"File axes: {', '.join(f'{code} {cases}' for code, cases in found.orientations.items())}.",
            0,
        )
    )
    return "\n".join(lines)


def _range(values: np.ndarray) -> str:
    low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
    return size_text(low) if low == high else f"{size_text(low)} to {size_text(high)}"


def _patch(found: Fingerprint, plan: SuggestedPlan) -> str:
    network = plan.network
    about = (
        f"The median volume at this spacing is {size_text(plan.median_shape)}. The patch has its proportions, is a multiple of "
        f"what the network's strides divide, and is as large as the memory allows (see training): it holds {plan.covered:.0%} "
        "of a median volume."
    )
    return section(
        "patch",
        comment(about),
        f"  size: {numbers(network.patch)}",
        comment(
            f"nnU-Net's share of patches centred on a structure, the class drawn first; {found.foreground_share:.2%} of the "
            "voxels are labelled."
        ),
        "  foreground: 0.33",
        "  foreground_by: class",
    )


def _augment(found: Fingerprint, plan: SuggestedPlan, window: Window | None, mirrored: tuple[int, ...]) -> str:
    patch = plan.network.patch
    flat = max(patch) > 3 * min(patch) and len(patch) == 3
    degrees, about = 30, "nnU-Net's default set of augmentations, with its probabilities and ranges."
    if flat:
        degrees = 5
        about += " Turned by 5° and not 30°: the patch is flat, and nnU-Net would turn it in its plane alone."
    elif len(patch) == 2:
        degrees = 180 if max(patch) <= 1.5 * min(patch) else 15
    noise = _NOISE
    if window is not None:
        noise = max(round(_NOISE * window.deviation, 3), 0.005)
        deviation = f"{window.deviation:.2g}"
        about += f" The noise is {_NOISE} of the labelled voxels' standard deviation, {deviation} after the window."
    lines = [comment(about)]
    if len(mirrored) < len(patch):
        lines.append(comment("Classes are told apart by left and right, so the axis between them is not mirrored."))
    if mirrored:
        lines.append(f"  flip: {{probability: 0.5, axes: {numbers(mirrored)}}}")
    lines += [
        f"  rotate: {{probability: 0.2, degrees: {degrees}}}",
        "  scale: {probability: 0.2, low: 0.7, high: 1.4}",
        f"  noise: {{probability: 0.1, std: {noise}}}",
        "  blur: {probability: 0.2, low: 0.5, high: 1.0, channel_probability: 0.5}",
        "  brightness: {probability: 0.15, low: 0.75, high: 1.25}",
        "  contrast: {probability: 0.15, low: 0.75, high: 1.25}",
        "  low_resolution: {probability: 0.25, low: 0.5, high: 1.0, channel_probability: 0.5}",
        "  gamma_inverted: {probability: 0.1, low: 0.7, high: 1.5, retain_stats: true, balanced: true}",
        "  gamma: {probability: 0.3, low: 0.7, high: 1.5, retain_stats: true, balanced: true}",
    ]
    return section("augment", *lines)


def _network(plan: SuggestedPlan) -> str:
    network = plan.network
    kernel = tuple(max(stage[axis] for stage in network.kernels[:-1]) for axis in range(len(network.patch)))
    flat_stages = sum(1 in stage for stage in network.kernels)
    about = (
        f"nnU-Net's network: {network.stages} stages. An axis is halved while it has 8 voxels and its spacing is within a "
        f"factor 2 of the finest. Features double from {plan.features[0]} up to {_most_features(plan)}."
    )
    lines = [comment(about), "  kind: dynunet", f"  features: {numbers(plan.features)}"]
    strides = (stride[0] if len(set(stride)) == 1 else stride for stride in network.strides)
    lines.append(f"  strides: [{', '.join(str(one) if isinstance(one, int) else numbers(one) for one in strides)}]")
    if 1 in kernel:
        lines.append(
            comment("Along the coarse axis the kernel is 1: its spacing never comes within a factor 2 of the finest.")
        )
        lines.append(f"  kernels: {numbers(kernel)}")
    elif flat_stages:
        lines.append(
            comment(
                f"nnU-Net would take a kernel of 1 along the coarse axis in the first {flat_stages} of the stages; here one "
                "kernel serves all stages."
            )
        )
        lines.append("  kernels: 3")
    lines += [
        comment("Heads of lower stages, as nnU-Net weighs them: all but the two lowest stages and the finest."),
        f"  deep_supervision: {plan.deep_supervision}",
    ]
    return section("network", *lines)


def _most_features(plan: SuggestedPlan) -> int:
    if plan.gpu_gib is None:
        return 128
    return 320 if len(plan.network.patch) == 3 else 512


def _optimisation(plan: SuggestedPlan) -> str:
    if plan.gpu_gib:
        about = "nnU-Net's loss and optimiser: SGD with Nesterov momentum 0.99, its rate falling as (1 − t)^0.9."
        optimizer = "{kind: sgd, learning_rate: 0.01, momentum: 0.99, nesterov: true, weight_decay: 3e-5}"
        schedule = "{kind: poly, power: 0.9}"
    else:
        about = "nnU-Net's loss. Few steps can be made on a CPU, in which AdamW learns far more than nnU-Net's SGD."
        optimizer = "{kind: adamw, learning_rate: 3e-3, weight_decay: 1e-2}"
        schedule = "{kind: cosine, warmup: 0.15}"
    return "\n".join([comment(about, 0), "loss: {kind: dice_ce}", f"optimizer: {optimizer}", f"schedule: {schedule}"])


def _training(found: Fingerprint, plan: SuggestedPlan) -> str:
    values, per_8 = plan.elements, ELEMENTS_AT_8_GIB[len(plan.network.patch)]
    if plan.gpu_gib:
        budget = f"{plan.budget_gib:.4g} GiB (0.75 of {plan.gpu_gib:.4g} GiB, at most {MOST_GIB:.0f})"
        length = "nnU-Net trains 1000 epochs of 250 steps; most is learnt in a fifth of them. Set more for the last per cent."
        epochs, steps = 200, 250
    else:
        budget = f"{CPU_GIB} GiB, so that a step takes a second or two on a CPU"
        length = "A short training for a CPU; more epochs learn more."
        epochs, steps = 20, 100
    assert USED_SHARE == 0.75
    about = (
        f"Memory of a step = 8 GiB × batch × {values:,} / {per_8:,}: the feature-map values of one patch against those for which "
        f"nnU-Net plans 8 GB. Here {plan.step_gib:.3g} GiB of {budget}. The patch shrinks until two fit; then the batch is what "
        f"fits ({plan.batch_in_memory}), at most {DATA_SHARE:.0%} of the set's voxels ({plan.batch_in_data}), and 2 at least."
    )
    if plan.gpu_gib is None:
        about += " On a CPU it is 4 at most."
    lines = [comment(about), f"  batch_size: {plan.batch_size}", comment(length)]
    lines += [f"  epochs: {epochs}", f"  iterations_per_epoch: {steps}"]
    lines += [comment("nnU-Net's bound on the gradient."), "  clip_norm: 12.0"]
    return section("training", *lines)


def _validation(plan: SuggestedPlan, mirrored: tuple[int, ...]) -> str:
    windows = min(max(plan.batch_size, 1), 4)
    whole = plan.covered > 0.99 and plan.gpu_gib is not None and bool(mirrored)
    if whole:
        about = "A median volume fits into one patch, so the mean over its mirror images costs little."
    elif mirrored:
        about = f"For final scores the mean over mirror images is better and slower: mirror: {numbers(mirrored)}."
    else:
        about = (
            "No mirror images: classes are told apart by left and right, and any axis of a plane may lie between them."
        )
    return section(
        "validation",
        "  every: 10",
        comment(about),
        f"  mirror: {numbers(mirrored) if whole else '[]'}",
        f"  window: {{overlap: 0.25, batch_size: {windows}}}",
    )

"""Owns how a profile is shown: the parts of a step, the rates against the ceilings, the verdict, the changes, other cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fasttrain.cli.figures import duration_text, rate_text, share_text
from fasttrain.cli.printing import print_table
from fasttrain.wording import counted

if TYPE_CHECKING:
    from fasttrain.studies.profiling.profile import Profile

_STEP_PARTS = ("copy", "forward", "backward", "optimiser")
_MAKING = ("read", "decode", "preprocess", "cut", "augment")
_KINDS = ("conv", "layout", "norm", "pointwise", "augment", "copy", "idle")


def print_profile(found: Profile) -> None:
    """All of it, on stdout."""
    plan = found.plan
    shape = (
        "in a CUDA graph"
        if found.parts.graph
        else "launched kernel by kernel"
        if found.evidence.on_gpu
        else "on the CPU"
    )
    layout = "channels last" if plan.channels_last else "channels first"
    print(f"{found.recipe} on {found.device}: {plan.amp}, {layout}, {shape}; cache {plan.cache}, {_workers(found)}")
    _print_runs(found)
    _print_parts(found)
    _print_rates(found)
    print(f"verdict: {found.verdict.bound}")
    for sentence in found.verdict.evidence:
        print(f"  {sentence}")
    _print_changes(found)
    _print_cards(found)
    for note in found.notes:
        print(note)
    print(f"trace: {found.trace}")


def _workers(found: Profile) -> str:
    plan = found.plan
    if found.parts.made is None:
        return "patches are cut on the device"
    if not plan.workers:
        return "batches are made between the steps"
    return counted(
        plan.workers,
        f"worker {plan.worker_kind}",
        f"worker {plan.worker_kind}es" if plan.worker_kind == "process" else None,
    )


def _print_runs(found: Profile) -> None:
    runs = found.runs
    rows = [["run", "ms a step", "±", "patches/s"]]
    named = (("real data", runs.real), ("one batch again and again", runs.same), ("loader alone", runs.loader))
    for name, pace in named:
        rows.append([name, _ms(pace.seconds), f"{pace.spread:.1%}", rate_text(found.patches / pace.seconds)])
    print_table(rows)


def _print_parts(found: Profile) -> None:
    parts, apart, real = found.parts, found.parts.apart, found.parts.apart.seconds
    on_gpu = found.evidence.on_gpu
    rows = [["part of a step", "host ms", *(["GPU ms"] if on_gpu else []), "of that step", "where"]]
    where = "the trainer's thread"
    inside = dict(apart.host)
    if parts.made is not None:
        beside = found.plan.workers > 0
        for part in _MAKING:
            if part in parts.made.parts:
                place = f"in {counted(found.plan.workers, 'worker')}, beside the step" if beside else where
                rows.append(_part(part, parts.made.parts[part], None, real, place, on_gpu))
                if beside:
                    inside.pop(part, None)
    else:
        for part in ("cut", "augment"):
            rows.append(_part(part, apart.host.get(part, 0.0), apart.gpu.get(part), real, where, on_gpu))
    for part in _STEP_PARTS:
        if part in apart.host or part != "copy":
            rows.append(_part(part, apart.host.get(part, 0.0), apart.gpu.get(part), real, where, on_gpu))
    rows.append(_part("waiting for data", apart.host.get("waiting", 0.0), None, real, where, on_gpu))
    if not on_gpu:
        rows.append(
            _part("host gaps", max(real - sum(inside.values()), 0.0), None, real, "outside of all parts", on_gpu)
        )
    else:
        idle = found.kinds.idle / 1000
        rows.append(_part("host gaps", 0.0, idle, real, "the GPU has nothing to do, over one batch", on_gpu))
    print_table(rows)
    if parts.graph:
        print("parts were measured without the CUDA graph, which the runs above and the kinds below have")
    if parts.once and found.plan.cache not in ("none",):
        told = ", ".join(f"{part} {_ms(seconds)}" for part, seconds in parts.once.items())
        print(f"once, as the run starts, a case takes in ms: {told}")
    if found.validation_seconds is not None:
        share = found.evidence.validating / found.evidence.epoch
        told = f"{found.validation_seconds:.3g} s for {counted(found.validation_cases, 'case')}"
        print(
            f"validation: {told}, {share_text(share)} of an epoch on average; an epoch takes {found.evidence.epoch:.3g} s in all"
        )


def _part(part: str, host: float, gpu: float | None, real: float, where: str, on_gpu: bool) -> list[str]:
    share = (gpu if on_gpu and gpu is not None else host) / real
    cells = [_ms(gpu) if gpu is not None else "–"] if on_gpu else []
    return [part, _ms(host), *cells, share_text(share), where]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f}"


def _long(seconds: float) -> str:
    return duration_text(seconds) if seconds >= 60 else f"{seconds:.3g} s"


def _print_rates(found: Profile) -> None:
    from fasttrain.studies.choice import of_ceiling, readable

    kinds, ceilings = found.kinds, found.ceilings
    device = "GPU" if found.evidence.on_gpu else "CPU"
    shares = {**kinds.kinds, "idle": kinds.idle}
    named = ", ".join(
        f"{'outside of torch' if kind == 'idle' and device == 'CPU' else kind} {shares[kind]:.2f}"
        for kind in _KINDS
        if shares.get(kind)
    )
    print(f"kinds on the {device}, ms of a step over one batch: {named}")
    if not ceilings:
        print("the network's work could not be counted, so that nothing can be held against the device's ceilings")
        return
    rate = found.patches / found.runs.same.seconds
    flops, moved = rate * ceilings["patch_flops"], rate * ceilings["patch_bytes"]
    top, band = ceilings["peak_flops"], ceilings["peak_bandwidth"]
    computes = of_ceiling(
        flops / top, ceilings["peak_flops_spread"], f"a product of matrices reaches here ({readable(top)}FLOP/s)"
    )
    moves = of_ceiling(moved / band, ceilings["peak_bandwidth_spread"], f"a copy reaches ({readable(band)}B/s)")
    print(f"computing {readable(flops)}FLOP/s, {computes}")
    print(f"moving {readable(moved)}B/s, counted layer by layer, of which fused ones move less: {moves}")


def _print_changes(found: Profile) -> None:
    from fasttrain.studies.profiling.verdict import most_to_gain

    if found.changes:
        print("what would gain most")
        rows = [["", "training", "epochs", "how it is known"]]
        rows += [[one.setting, f"{one.gain:+.0%}", f"{one.epoch_gain:+.0%}", one.how] for one in found.changes]
        print_table(rows, indent="  ")
    else:
        print("no setting that was tried or reckoned gains more than 2%; `tune-batch` measures other batch sizes")
    most = ", ".join(f"{name} {gain:+.0%}" for name, gain in most_to_gain(found.evidence).items())
    print(f"at most, epochs: {most}")


def _print_cards(found: Profile) -> None:
    if not found.projections:
        return
    how = (
        "at best, by the network's counted work; validation and data left out"
        if found.at_best
        else "by the published rates and bandwidths of the cards"
    )
    print(f"other cards, an ESTIMATE {how}; {counted(found.epochs, 'epoch')}")
    priced = any(one.cost is not None for one in found.projections)
    rows = [["card", "ms a step", "epoch", "run", *(["cost"] if priced else [])]]
    for one in found.projections:
        cost = ["–" if one.cost is None else f"{one.cost:.2f} USD"] if priced else []
        rows.append([one.card, _ms(one.step_seconds), _long(one.epoch_seconds), _long(one.run_hours * 3600), *cost])
    print_table(rows, indent="  ")
    if not priced:
        print("  cost: give the price of an hour, such as --price H100=2.99")

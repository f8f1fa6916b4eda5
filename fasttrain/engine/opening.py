"""Owns opening the cases of both parts: volumes are read and kept as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fasttrain.batches import Resident, fill
from fasttrain.data.caches import Told, made_together, open_case_source
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.data.outcomes import one_outcome
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.splits import Split
from fasttrain.engine.planning.plan import Plan
from fasttrain.errors import DataError
from fasttrain.machine.hardware import Hardware
from fasttrain.machine.ranks import ONLY_ONE, Ranks
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, CaseSource

CaseProgress = Callable[[str, int, int], None]
"""Told what is read, how many cases are done, and of how many."""


def open_all(
    recipe: Recipe,
    plan: Plan,
    split: Split,
    hardware: Hardware,
    progress: CaseProgress,
    told: Told,
    epoch: int,
    ahead: MadeAhead | None = None,
    ranks: Ranks = ONLY_ONE,
) -> tuple[CaseSource | Resident, CaseSource]:
    """Training and validation cases. Both parts are read before anything is raised, so that one error lists the faulty cases of
    both. Volumes that are made `ahead` are taken as they come, and the rest of these is given up. All `ranks` of a run call it
    alike, share the work and raise the same.
    """

    def opened(part: str, cases: Sequence[Case]) -> CaseSource:
        return open_case_source(
            "memory" if plan.cache == "gpu" else plan.cache,
            cases,
            Preprocess(recipe, training=part == "training"),
            plan.fill_threads,
            lambda done, total: progress(f"reading {part} cases", done, total),
            told=told,
            epoch=epoch,
            ahead=ahead,
            ranks=ranks,
        )

    def resident() -> Resident:
        # Cases are made and copied as they come; the host keeps what the GPU has no room for
        copied = lambda done, total: progress("reading training cases to the GPU", done, total)  # noqa: E731
        made = Preprocess(recipe)
        together = made_together(split.train, made, ranks, ahead, told)
        source = together or open_case_source("none", split.train, made, plan.fill_threads, told=told, ahead=ahead)
        sharing = ranks if together is not None and plan.cards > 1 else None
        device, threads = hardware.torch_device, plan.fill_threads
        return fill(source, recipe, device, plan.resident_bytes, threads, copied, told, sharing)

    training: CaseSource | Resident | None = None
    validation: CaseSource | None = None
    faults: list[str] = []
    try:
        try:
            if plan.cache == "gpu":
                training = one_outcome(ranks.gather, resident, Resident.close)
            else:
                training = opened("training", split.train)
        except DataError as error:
            faults.extend(error.faults)
        try:
            validation = opened("validation", split.validation)
        except DataError as error:
            faults.extend(error.faults)
    finally:
        if ahead is not None:
            ahead.close()
    if training is None or validation is None or faults:
        for one in (validation, training):
            if one is not None:
                one.close()
        raise DataError(faults)
    return training, validation

"""Owns opening the cases of both parts: volumes are read and kept as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fasttrain.batches import Resident, fill
from fasttrain.data.caches import Told, open_case_source
from fasttrain.data.made_ahead import MadeAhead
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.splits import Split
from fasttrain.engine.planning.plan import Plan
from fasttrain.errors import DataError
from fasttrain.machine.hardware import Hardware
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
) -> tuple[CaseSource | Resident, CaseSource]:
    """Training and validation cases. Both parts are read before anything is raised, so that one error lists the faulty cases of
    both. Volumes that are made `ahead` are taken as they come, and the rest of these is given up.
    """

    def opened(part: str, cases: Sequence[Case]) -> CaseSource:
        kind = plan.cache
        if kind == "gpu":
            kind = "none" if part == "training" else "memory"
        return open_case_source(
            kind,
            cases,
            Preprocess(recipe, training=part == "training"),
            plan.fill_threads,
            lambda done, total: progress(f"reading {part} cases", done, total),
            told=told,
            epoch=epoch,
            ahead=ahead,
        )

    training: CaseSource | Resident | None = None
    validation: CaseSource | None = None
    faults: list[str] = []
    try:
        try:
            training = opened("training", split.train)
            if plan.cache == "gpu":
                # Cases are made and copied by the same threads; the host keeps what the GPU has no room for
                copied = lambda done, total: progress("reading training cases to the GPU", done, total)  # noqa: E731
                room, threads = plan.resident_bytes, plan.fill_threads
                training = fill(training, recipe, hardware.torch_device, room, threads, copied, told)
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
            if one is not None and not isinstance(one, Resident):
                one.close()
        raise DataError(faults)
    return training, validation

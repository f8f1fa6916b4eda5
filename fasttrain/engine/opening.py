"""Owns opening the cases of both parts: volumes are read and kept as the plan says, the two parts beside one another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from fasttrain.background import Background
from fasttrain.batches import Resident, fill
from fasttrain.data.caches import Told, open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.splits import Split
from fasttrain.engine.planning.plan import Plan
from fasttrain.errors import DataError
from fasttrain.machine.hardware import Hardware
from fasttrain.recipe import Recipe
from fasttrain.samples import Case, CaseSource

CaseProgress = Callable[[str, int, int], None]
"""Told what is read, how many cases are done, and of how many."""

_KEPT_IN_MEMORY = ("memory", "gpu")
_BESIDE_FROM_THREADS = 4
_SHARE = 4
"""Of the threads one in so many reads validation cases, of which there are about as many fewer."""


def open_all(
    recipe: Recipe,
    plan: Plan,
    split: Split,
    hardware: Hardware,
    progress: CaseProgress,
    told: Told,
    epoch: int,
) -> tuple[CaseSource | Resident, CaseSource]:
    """Training and validation cases. Both parts are read before anything is raised, so that one error lists the faulty cases of
    both. Where there are threads for it they are read at the same time: the last cases of a part leave most threads idle.
    """
    whole = plan.fill_threads
    beside = plan.cache in _KEPT_IN_MEMORY and whole >= _BESIDE_FROM_THREADS
    share = whole // _SHARE if beside else whole
    validation = _Opening(
        lambda told: _open("validation", recipe, plan, split.validation, share, progress, told, epoch), told
    )
    if beside:
        validation.begin()
    training: CaseSource | Resident | None = None
    faults: list[str] = []
    try:
        threads = whole - share if beside else whole
        training = _open("training", recipe, plan, split.train, threads, progress, told, epoch)
        if plan.cache == "gpu":
            # Cases are made and copied by the same threads; the host keeps what the GPU has no room for
            copied = lambda done, total: progress("reading training cases to the GPU", done, total)  # noqa: E731
            training = fill(training, recipe, hardware.torch_device, plan.resident_bytes, threads, copied, told)
    except DataError as error:
        faults.extend(error.faults)
    except BaseException:
        validation.give_up()
        raise
    source = None
    try:
        source = validation.result()
    except DataError as error:
        faults.extend(error.faults)
    if training is None or source is None or faults:
        for one in (source, training):
            if one is not None and not isinstance(one, Resident):
                one.close()
        raise DataError(faults)
    return training, source


class _Opening:
    """Opens a source in a thread of its own, where `begin` was called, or else when its result is asked for.

    What it has to say is told with the result, by the thread that asks.
    """

    def __init__(self, work: Callable[[Told], CaseSource], told: Told) -> None:
        self._work = work
        self._told = told
        self._said: list[tuple[str, str]] = []
        self._beside: Background[CaseSource] = Background("reading validation cases")

    def begin(self) -> None:
        self._beside.give(self._open)

    def result(self) -> CaseSource:
        """Waits for it; raises what opening raised."""
        try:
            return self._beside.fetch() if self._beside.given else self._open()
        finally:
            for text, level in self._said:
                self._told(text, level)

    def give_up(self) -> None:
        """Waits for what was begun and closes it: a thread that reads when the interpreter ends aborts the process."""
        if self._beside.given:
            # What the other part raised is under way already
            with contextlib.suppress(BaseException):
                self._beside.fetch().close()

    def _open(self) -> CaseSource:
        return self._work(lambda text, level: self._said.append((text, level)))


def _open(
    part: str,
    recipe: Recipe,
    plan: Plan,
    cases: Sequence[Case],
    threads: int,
    progress: CaseProgress,
    told: Told,
    epoch: int,
) -> CaseSource:
    kind = plan.cache
    if kind == "gpu":
        kind = "none" if part == "training" else "memory"
    return open_case_source(
        kind,
        cases,
        Preprocess(recipe, training=part == "training"),
        threads,
        lambda done, total: progress(f"reading {part} cases", done, total),
        told=told,
        epoch=epoch,
    )

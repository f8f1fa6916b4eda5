"""Owns one try at carrying out a run that is decided: its parts are built, taken to where it was, and fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from fasttrain.data.seen_files import SEEN
from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.failures import explained
from fasttrain.engine.fit import Fit
from fasttrain.engine.orders import give_orders
from fasttrain.engine.phases import TRAINING
from fasttrain.engine.planning.gpu_memory import stitching_bytes
from fasttrain.engine.preparing import Prepared
from fasttrain.engine.resuming.going_on import GoingOn
from fasttrain.engine.second_try import free_memory, ran_out_early
from fasttrain.engine.session import Session
from fasttrain.engine.validating.validation_memory import prepare_validation
from fasttrain.errors import FasttrainError, OutOfMemoryError
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.telemetry.events import Message, Progress


class Attempt:
    """The parts of a run from when they are built."""

    def __init__(self, folder: RunFolder, session: Session, monitor: DeviceMonitor, going: GoingOn | None) -> None:
        self.folder = folder
        self.session = session
        self.monitor = monitor
        self.going = going
        self.saved = going.saved if going is not None else None
        self.assembly: Assembly | None = None
        self.fit: Fit | None = None

    def run(self, prepared: Prepared, forgiving: bool = False) -> OutOfMemoryError | None:
        """Builds and fits. Where it is `forgiving`, memory that runs out in the first steps is returned and not raised."""
        try:
            self._run(prepared)
        except Exception as error:
            known = explained_in(error, prepared, self.session, self.fit) if forgiving else None
            begun = self.saved.state["progress"] if self.saved is not None else {"step": 0, "epoch": 0}
            if not isinstance(known, OutOfMemoryError) or not ran_out_early(self.session, self.fit, begun):
                raise
            free_memory(error)
            return known
        return None

    def close(self) -> None:
        """Gives up cases, network and workers."""
        if self.assembly is not None:
            self.assembly.close()
        self.assembly = self.fit = None

    def _run(self, prepared: Prepared) -> None:
        with self.session.stop.at_rest():
            self._prepare(prepared)
        assert self.fit is not None
        self.fit.run()

    def _prepare(self, prepared: Prepared) -> None:
        """All that comes before the first step: there is nothing yet that a checkpoint lacks."""
        recipe, hardware, session, saved = prepared.recipe, prepared.hardware, self.session, self.saved
        prepare_torch(prepared.plan, hardware)
        session.phases.watch(hardware.torch_device)
        epoch = int(saved.state["progress"]["epoch"]) if saved is not None else 0
        told = lambda text, level: session.emit(Message(text, level))  # noqa: E731
        progress = _case_progress(session)
        split, ahead = prepared.split, prepared.ahead
        ranks = session.ranks
        give_orders(ranks, prepared, saved)
        self.assembly = build(
            recipe, prepared.plan, hardware, split, progress, told, epoch, session.enter, ahead, ranks
        )
        SEEN.forget()
        if self.going is not None:
            self.going.take_up(self.assembly, prepared, session.emit)
        ranks.share(asdict(self.assembly.state.progress))
        self.fit = Fit(self.assembly, recipe, self.folder, session, self.monitor)
        ready_validation(self.assembly, prepared, session)


def ready_validation(assembly: Assembly, prepared: Prepared, session: Session) -> None:
    """Decides where windows are summed, which is told."""
    plan, warn = prepared.plan, lambda text: session.emit(Message(text, "warning"))
    decision = prepare_validation(assembly.validator, plan.step_bytes, plan.cuda_graphs, warn)
    if decision is not None:
        session.emit(Message(f"{decision.name}: {decision.value} ({decision.reason})"))


def explained_in(error: BaseException, prepared: Prepared, session: Session, fit: Fit | None) -> FasttrainError | None:
    """The user's sentence, with the phase in which it came and, on a GPU, what each held; of several ranks, who is gone."""
    if (lost := session.ranks.explain(error)) is not None:
        return lost
    plan, phase = prepared.plan, session.phases.now
    if phase == TRAINING and fit is not None:
        phase = f"training step {fit.progress.step + 1}"
    stitching = stitching_bytes(prepared.recipe, prepared.hardware, plan.sizes)
    # Memory that other ranks read is not torch's, nor counted by it
    volumes = plan.resident_bytes if plan.cards == 1 else 0
    state = session.phases.state(session.phases.now, volumes, plan.step_bytes, stitching)
    return explained(error, prepared.recipe, plan.workers, state, phase, plan.activation_checkpointing)


def _case_progress(session: Session) -> Callable[[str, int, int], None]:
    def told(what: str, done: int, total: int) -> None:
        session.emit(Progress(what, done, total))
        session.stop.check()

    return told

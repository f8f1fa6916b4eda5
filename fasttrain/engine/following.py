"""Owns the ranks of a run beside the first: they do as it says, and write, decide and print nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fasttrain.data.finding import cases_for
from fasttrain.data.location import data_root
from fasttrain.data.splits import Split
from fasttrain.engine.attempt import explained_in, ready_validation
from fasttrain.engine.build import Assembly, build, prepare_torch
from fasttrain.engine.fit import Fit
from fasttrain.engine.orders import Orders, Over
from fasttrain.engine.outline import outline_of
from fasttrain.engine.preparing import Prepared, load_for_steps
from fasttrain.engine.session import Session
from fasttrain.engine.sound_cases import sound_cases
from fasttrain.engine.state import Progress
from fasttrain.engine.stop import Following, Stopped, StopRequest
from fasttrain.errors import DataError
from fasttrain.machine.allocator import allocator_setting, expand_segments
from fasttrain.machine.hardware import survey
from fasttrain.machine.open_files import raise_open_file_limit
from fasttrain.machine.ranks import Ranks
from fasttrain.machine.threads import limit_threads
from fasttrain.telemetry.device_monitor import DeviceMonitor
from fasttrain.wording import first_few


def follow(
    ranks: Ranks,
    data: Path | None,
    device: str,
    stop: StopRequest,
    begun: Callable[[dict[str, str], dict[str, str]], None] = lambda theirs, own: None,
) -> int:
    """Carries out what the first rank orders until that is over, and returns the exit code that it names.

    data: the folder of the set on this machine, else where the first rank has it, else the recipe's usual one. begun: hears what
    the cases of a run hold on the first rank and, on another machine, here. Raises FasttrainError of the kind that fits.
    """
    load_for_steps()
    while True:
        order = ranks.share(None)
        if isinstance(order, Over):
            return order.exit_code
        _carry_out(order, ranks, data, device, stop, begun)


def _carry_out(
    orders: Orders,
    ranks: Ranks,
    data: Path | None,
    device: str,
    stop: StopRequest,
    begun: Callable[[dict[str, str], dict[str, str]], None],
) -> None:
    # A flag of this run alone, so that its early stopping is not the next fold's
    session = Session([], Following(stop), time.time(), ranks=ranks)
    prepared = _prepared(orders, ranks, data, device, stop, begun)
    raise_open_file_limit()
    stop.begun = True
    assembly: Assembly | None = None
    fit: Fit | None = None
    try:
        assembly = _built(orders, prepared, session)
        fit = Fit(assembly, prepared.recipe, None, session, DeviceMonitor(None))
        ready_validation(assembly, prepared, session)
        fit.run()
    except Stopped:
        # The first rank says what comes next
        pass
    except Exception as error:
        known = explained_in(error, prepared, session, fit)
        if known is None:
            raise
        raise known from error
    finally:
        session.close()
        if assembly is not None:
            assembly.close()


def _prepared(
    orders: Orders,
    ranks: Ranks,
    data: Path | None,
    device: str,
    stop: StopRequest,
    begun: Callable[[dict[str, str], dict[str, str]], None],
) -> Prepared:
    recipe, plan = orders.recipe, orders.plan
    hardware = survey(device, ranks.place)
    if hardware.on_gpu and allocator_setting() is None:
        expand_segments(plan.expandable_segments)
    limit_threads(plan.threads)
    root = data if data is not None else orders.root if orders.root.is_dir() else data_root(recipe, None, os.environ)
    found = cases_for(recipe.data, root)
    there = {case.name: case for case in found.every}
    missing = [name for name in (*orders.training, *orders.validation) if name not in there]
    if missing:
        raise DataError(
            f"rank {ranks.place.rank} on {socket.gethostname()}: {root} lacks {len(missing)} of the cases of the first rank "
            f"({first_few(missing)}); bring the same set there, or name its folder with --data"
        )
    contents: dict[str, Any] = {}
    if ranks.place.local_rank == 0:
        # The first rank of another machine, whose files nobody has read yet
        former = {
            "cases": {"training": orders.training, "validation": orders.validation},
            "skipped_cases": {name: () for name in there if name not in orders.contents},
        }
        contents = sound_cases(recipe, root, found, former, lambda event: None, stop)[2]
    begun(orders.contents, contents)
    training, validation = (tuple(there[name] for name in part) for part in (orders.training, orders.validation))
    split = Split(training, validation, ())
    return Prepared(recipe, hardware, root, split, plan, outline_of(recipe), {}, orders.contents)


def _built(orders: Orders, prepared: Prepared, session: Session) -> Assembly:
    plan, hardware, ranks = prepared.plan, prepared.hardware, session.ranks
    prepare_torch(plan, hardware)
    session.phases.watch(hardware.torch_device)
    epoch = int(orders.state["progress"]["epoch"]) if orders.state is not None else 0
    assembly = build(
        prepared.recipe,
        plan,
        hardware,
        prepared.split,
        lambda what, done, total: session.stop.check(),
        lambda text, level: None,
        epoch,
        session.enter,
        None,
        ranks,
    )
    try:
        if orders.state is not None:
            assembly.state.restore(orders.state, "the first rank's checkpoint")
        # As the first rank has it, once it fits the plan of this number of ranks
        assembly.state.progress = Progress(**ranks.share(None))
    except BaseException:
        assembly.close()
        raise
    return assembly

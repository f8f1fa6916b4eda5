"""Run folders that no training stands behind: written by the parts that write real ones, in milliseconds."""

import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fasttrain.engine.resuming.changes import as_values
from fasttrain.recipe import resolve
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.event_log import EventLog
from fasttrain.telemetry.events import EpochEnded, FirstStep, RunEnded, RunStarted, StepLogged, ValidationFigures
from fasttrain.telemetry.metrics_csv import MetricsTable
from fasttrain.telemetry.summary import write_summary
from fasttrain.whole_files import write_json

CLASSES = ("liver", "kidney")
STEPS = 10
DECIDED = {
    "amp": "off",
    "channels_last": False,
    "tf32": False,
    "threads": 2,
    "fused_layers": False,
    "cuda_graphs": False,
}
MACHINE = {"device": "cpu", "device_name": "A CPU", "cpus": 4, "gpu_uuid": None}


def made_run(path: Path, epochs: int = 3, status: str | None = "done", **more: Any) -> RunFolder:
    """A run of `epochs` closed epochs of ten steps, 2 s each, validated every time with Dice 0.1, 0.2, …

    status: how its summary says that it ended; None: it has none, as after a kill. more: `recipe` ({key: value} set in the demo),
    `hardware`, `plan`, `of` (epochs that it was to have), `price`, `cases`, `environment`.
    """
    folder = RunFolder(path)
    folder.checkpoints.mkdir(parents=True)
    resolved = resolve("demo", {"training.epochs": more.get("of", epochs), **more.get("recipe", {})})
    effective = resolved.recipe.training.batch_size * resolved.recipe.training.accumulate
    folder.recipe.write_text(resolved.as_yaml())
    hardware = {**MACHINE, **more.get("hardware", {})}
    write_json(folder.environment, {"format": 1, "hardware": hardware, "host": "there", **more.get("environment", {})})
    sizes = {
        "validation_cases": 2,
        "effective_batch": effective,
        "steps_per_epoch": STEPS,
        "epochs": more.get("of", epochs),
    }
    decisions = [{"name": "amp", "value": "off", "reason": "measured <b>so</b>"}]
    record = {
        **DECIDED,
        "sizes": sizes,
        "decisions": decisions,
        "recipe": as_values(resolved.recipe),
        **more.get("plan", {}),
    }
    write_json(folder.plan, record)
    observers = [MetricsTable(folder.metrics, CLASSES, False), EventLog(folder.events)]
    began = time.time()
    started = RunStarted(
        str(path), "demo", hardware["device_name"], more.get("of", epochs), STEPS, 4, 2, (("amp", "off", "measured <b>so</b>"),),
        began=began, price_per_hour=more.get("price"), outline="a network",
    )  # fmt: skip
    events = [
        started,
        FirstStep(5.0, {"import": 5.0}),
        *(one for epoch in range(1, epochs + 1) for one in epoch_of(epoch, effective)),
    ]
    for event in events:
        for observer in observers:
            observer.on_event(event)
    if status is not None:
        scores = {"case_a": {"liver": 0.9, "kidney": 0.7}, "case_b": {"liver": 0.5, "kidney": None}}
        write_summary(
            folder.summary, status=status, stopped_by=more.get("stopped_by"), exit_code=more.get("exit_code", 0),
            best={"metric": "val_dice", "value": 0.1 * epochs, "epoch": epochs},
            seconds={"total": 9.0 + 3.0 * epochs, "to_first_step": 5.0, "training": 2.0 * epochs, "validation": 1.0 * epochs},
            cases=more.get("cases", scores), attempts=1, hours={"process": 1.0, "run": 1.0, "projected": 1.0}, cost=None,
            error=more.get("error"),
        )  # fmt: skip
        ended = RunEnded(status, more.get("stopped_by"), more.get("exit_code", 0), "dice", 0.1, 1, 1.0, str(path))
        observers[1].on_event(ended)
    for observer in observers:
        observer.close()
    return folder


def epoch_of(epoch: int, effective: int = 2) -> list[StepLogged | EpochEnded]:
    """The events of one epoch."""
    dice = 0.1 * epoch
    figures = ValidationFigures(dice, dict.fromkeys(CLASSES, dice), dict.fromkeys(CLASSES, 2), seconds=1.0, cases=2)
    rate = effective * STEPS / 2.0
    step = StepLogged(epoch, STEPS * epoch, STEPS, 1.0 / epoch, 1e-3, rate, 0.03, seconds_left=100.0)
    return [step, EpochEnded(epoch, STEPS * epoch, 2.0, 1.0 / epoch, 1e-3, rate, 0.03, None, None, figures, True, 90.0)]


def line(at: float, event: str, /, **more: object) -> str:
    """A line of events.jsonl."""
    moment = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps({"time": moment, "event": event, **more}) + "\n"

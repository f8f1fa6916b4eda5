"""Owns a drill from first to last: the unbroken run, the kills and resumes, the comparison, and its folder beside the runs."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fasttrain.engine.stop import StopRequest
from fasttrain.errors import MachineError, RecipeError, StorageError
from fasttrain.machine.folder_lock import alone, hold
from fasttrain.recipe import Recipe
from fasttrain.recipe.run_spec import parse_intervals
from fasttrain.run_folder import RunFolder
from fasttrain.studies.drill.comparing import difference_beyond_spread, first_difference
from fasttrain.studies.drill.life import Life
from fasttrain.studies.drill.report import Report, kills_of
from fasttrain.studies.drill.shape import Shape
from fasttrain.telemetry.events import Event, Message, Progress
from fasttrain.wording import counted

PREFIX = ".drill-"
TRAINING, SAVING, VALIDATING, STARTING = "training", "saving", "validating", "starting"
_MOMENTS = (TRAINING, SAVING, VALIDATING, STARTING)
_EPOCHS = 3
_LEAST_STEPS, _MOST_STEPS = 4, 400
"""Of an epoch."""
_PACE_STEPS, _PACE_SECONDS = 4, 2.0
_MOST_TRAINING_SECONDS = 10.0
_BUDGET_SECONDS = 180.0
_PATIENCE = 2.0
"""So many times that a drill may take on a slow machine; and so many times what it may is where it is ended."""


@dataclass(frozen=True)
class Wishes:
    """What is asked of a drill. budget_seconds: None: three minutes, and more on a slow machine. runs: the folder of the runs, on
    whose disk it works.
    """

    kills: int = 3
    seed: int = 0
    budget_seconds: float | None = None
    runs: Path = Path("runs")


class Drill:
    """A drill of one recipe on this machine."""

    def __init__(
        self,
        recipe: Recipe,
        data: Path | None,
        device: str,
        wishes: Wishes,
        emit: Callable[[Event], None],
        stop: StopRequest,
    ) -> None:
        self.recipe = recipe
        self.data = None if data is None else str(data)
        self.device = device
        self.wishes = wishes
        self.folder = wishes.runs / f"{PREFIX}{recipe.name}-{os.getpid()}"
        self.report = Report(recipe.name, recipe.output.checkpoint_every, wishes.kills)
        self._emit = emit
        self._stop = stop
        self._random = random.Random(wishes.seed)
        self._began = time.monotonic()
        self._most_seconds = wishes.budget_seconds or _PATIENCE * _BUDGET_SECONDS
        self._shape = Shape(_EPOCHS, _LEAST_STEPS, "1s")

    def run(self) -> Report:
        """Raises Stopped where a stop was asked for, RecipeError where the budget is too short, MachineError where it turns out
        to be by far, and what the run itself raises. The folder is gone then, but for the small files of runs that differ.
        """
        clear_left_overs(self.wishes.runs)
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be made: {error.strerror}; choose another with --runs") from error
        held = hold(self.folder)
        try:
            self._conduct()
        finally:
            held.release()
            self._clear()
        self.report.seconds = time.monotonic() - self._began
        return self.report

    def _conduct(self) -> None:
        self._find_pace()
        unbroken = self._unbroken("unbroken")
        record = json.loads(RunFolder(unbroken).environment.read_text(encoding="utf-8"))
        second = self._unbroken("unbroken-2") if record["hardware"]["device"].startswith("cuda") else None
        broken = self._broken()
        if second is None:
            self.report.difference = first_difference(unbroken, broken)
        else:
            self.report.spread, self.report.difference = difference_beyond_spread((unbroken, second), broken)

    def _find_pace(self) -> None:
        """A run of a few steps, by which precision and layout are chosen and the length of the others."""
        self._say("measuring a step of the recipe on a few of its cases")
        self._shape = replace(self._shape, steps_per_epoch=_MOST_STEPS)
        life = self._life("pace", resume=False)
        try:
            life.until(lambda one: len(one.times) > _PACE_STEPS and one.trained_seconds > _PACE_SECONDS)
            if life.code:
                life.finish()
        finally:
            life.kill()
        step = max(life.trained_seconds / max(len(life.times) - 1, 1), 1e-4)
        # A later start has nothing to choose any more
        start = max((life.first_step_seconds or 0.0) - life.plan_seconds, 0.0)
        self.report.step_seconds, self.report.start_seconds = step, start
        plan = json.loads(RunFolder(life.run).plan.read_text(encoding="utf-8"))
        steps = self._affordable_steps(step, start)
        self.report.steps = steps * _EPOCHS
        self._shape = Shape(
            _EPOCHS,
            steps,
            f"{min(max(self.report.steps * step / 8, 0.05), 5.0):.2f}s",
            amp=plan["amp"],
            channels_last=plan["channels_last"],
            activation_checkpointing=plan["activation_checkpointing"],
        )
        whole = json.loads((self.folder / "whole.json").read_text(encoding="utf-8"))["steps_per_epoch"]
        each = {"seconds": 1.0, "steps": step, "epochs": step * whole}
        intervals = parse_intervals(self.recipe.output.checkpoint_every)
        self.report.expected_loss_seconds = min(one.amount * each[one.unit] for one in intervals)
        shutil.rmtree(life.run, ignore_errors=True)

    def _affordable_steps(self, step: float, start: float) -> int:
        """Steps of an epoch, as many as the time allows."""
        kills, passed = self.wishes.kills, time.monotonic() - self._began
        # Two unbroken runs on a GPU, one elsewhere, and the broken one, which is started once more than it is killed
        starts = start * (kills + 3)
        least = 3 * _EPOCHS * _LEAST_STEPS * step
        if self._most_seconds < passed + starts + least:
            needed = passed + starts + 1.5 * least
            raise RecipeError(
                f"--budget {self._most_seconds:g}s is too short: a start takes {start:.0f} s here and a step {step:.2g} "
                f"s, so that {counted(kills, 'kill')} take about {needed:.0f} s; give it more, or fewer --kills"
            )
        spare = (self.wishes.budget_seconds or _BUDGET_SECONDS) - passed - starts
        seconds = min(_MOST_TRAINING_SECONDS, spare / 4)
        return min(max(math.ceil(seconds / step / _EPOCHS), _LEAST_STEPS), _MOST_STEPS)

    def _unbroken(self, name: str) -> Path:
        self._say(
            f"training {counted(self.report.steps, 'step')} without a kill" + ("" if name == "unbroken" else ", again")
        )
        life = self._life(name, resume=False)
        try:
            life.until(self._watch)
        finally:
            life.close()
        life.finish()
        self.report.note_saves(life)
        self.report.start_seconds = life.first_step_seconds or self.report.start_seconds
        self.report.device = str(RunFolder(life.run).read_summary()["device"])
        return life.run

    def _broken(self) -> Path:
        moments = [_MOMENTS[number % len(_MOMENTS)] for number in range(self.wishes.kills)]
        self._random.shuffle(moments)
        lives: list[Life] = []
        killed_at: list[float] = []
        for number, moment in enumerate(moments):
            if self._time_left < self.report.start_seconds + self.report.steps * self.report.step_seconds:
                self._say(f"the time is over: {number} of {counted(len(moments), 'kill')} made")
                break
            life = self._next_life(lives)
            try:
                self._await(life, moment, len(moments) - number)
            finally:
                ended, at = life.code is not None, life.kill()
            if ended:
                break
            killed_at.append(at)
            self._say(
                f"kill {number + 1} of {len(moments)}: while {moment}, after step {life.step or life.resumed_step or 0}"
            )
        if len(lives) == len(killed_at):
            life = self._next_life(lives)
            try:
                life.until(self._watch)
            finally:
                life.close()
        lives[-1].finish()
        self.report.kills = kills_of(lives, moments, killed_at, self.report.step_seconds)
        return lives[-1].run

    def _next_life(self, lives: list[Life]) -> Life:
        lives.append(self._life("broken", resume=RunFolder(self.folder / "broken").holds_a_run()))
        return lives[-1]

    def _await(self, life: Life, moment: str, kills_left: int) -> None:
        """Returns at a moment of the asked kind, or where the process has ended. The steps that are left are shared out among the
        kills that are.
        """
        step = self.report.step_seconds
        if moment == STARTING:
            life.wait(self._random.uniform(0.05, 1.0) * self.report.start_seconds)
            return
        life.until(lambda one: one.started)
        left = self.report.steps - (life.resumed_step or 0)
        target = (life.resumed_step or 0) + max(int(self._random.random() * left / kills_left), 1)
        life.until(lambda one: self._watch(one) or one.step >= target)
        if moment == SAVING:
            life.until(lambda one: any((one.run / "checkpoints").glob(".*.part")), 10.0 + 20 * step)
        elif moment == VALIDATING:
            life.until(lambda one: one.validating)
            life.wait(self._random.uniform(0.0, min(step, 0.1)))
        else:
            life.wait(self._random.uniform(0.0, step))

    def _life(self, name: str, resume: bool) -> Life:
        task: dict[str, Any] = {
            "recipe": self.recipe.model_dump_json(),
            "data": self.data,
            "device": self.device,
            "run": str((self.folder / name).absolute()),
            "resume": resume,
            "shape": self._shape.record(),
        }
        return Life(self.folder / name, task, self._check)

    def _watch(self, life: Life) -> bool:
        """Tells how far a run is; False, so that it can be waited with."""
        if life.step:
            self._emit(Progress("drill: training", life.step, self.report.steps))
        return False

    @property
    def _time_left(self) -> float:
        return self._most_seconds - (time.monotonic() - self._began)

    def _check(self) -> None:
        self._stop.check()
        if time.monotonic() - self._began > _PATIENCE * self._most_seconds:
            if self.wishes.budget_seconds is not None:
                raise RecipeError(
                    f"--budget {self._most_seconds:g}s is too short: {_PATIENCE:g} times that are over and the drill is not; "
                    "give it more, or fewer --kills"
                )
            raise MachineError(
                f"the drill has taken {_PATIENCE:g} times the {self._most_seconds:g} s that it may, more than it measured at its "
                "beginning: the machine is busy with something else, or its disk is slow; give it more with --budget"
            )

    def _say(self, text: str) -> None:
        self._emit(Message(f"drill: {text}"))

    def _clear(self) -> None:
        if self.report.difference is not None:
            for checkpoints in self.folder.glob("*/checkpoints"):
                shutil.rmtree(checkpoints, ignore_errors=True)
            kept = self.folder.with_name(f"drill-{self.recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            self.folder.rename(kept)
            self.report.kept = str(kept)
            return
        shutil.rmtree(self.folder, ignore_errors=True)


def clear_left_overs(runs: Path) -> None:
    """Removes what drills left under a folder of runs that were themselves killed."""
    for folder in runs.glob(f"{PREFIX}*") if runs.is_dir() else ():
        with alone(folder) as why:
            if why is None:
                shutil.rmtree(folder, ignore_errors=True)

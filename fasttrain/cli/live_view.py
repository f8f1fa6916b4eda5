"""Owns the view of a run on a terminal: one block redrawn at most four times a second, messages above it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fasttrain.cli.figures import (
    device_text,
    duration_text,
    end_line,
    first_step_line,
    hours_text,
    loss_text,
    one_line,
    rate_text,
    scientific_text,
    score_text,
    share_text,
    start_lines,
)
from fasttrain.cli.on_finish import ON_FINISH
from fasttrain.telemetry.events import (
    EpochEnded,
    Event,
    FirstStep,
    Message,
    Progress,
    RunEnded,
    RunStarted,
    StepLogged,
    ValidationFigures,
)

_REFRESHES_PER_SECOND = 4
_SHOW_CURSOR = "\x1b[?25h"
# A lost terminal answers EIO, a closed stream ValueError, and rich makes SystemExit of a broken pipe.
_GONE = (OSError, ValueError, SystemExit)


class LiveView:
    """Observer that draws a run's state with rich. A terminal that has gone away silences it and never the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._run: RunStarted | None = None
        self._pace: StepLogged | EpochEnded | None = None
        self._scores: ValidationFigures | None = None
        self._best: tuple[float, int] | None = None
        self._progress: Progress | None = None
        self._silent = False
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,  # stdout carries data, perhaps into a file; only messages belong above the view
            redirect_stderr=True,
        )
        self._attempt(self._live.start)

    def on_event(self, event: Event) -> None:
        """Takes the event into the picture that the next refresh draws; messages are printed above it at once."""
        if isinstance(event, RunStarted):
            self._run = event
            for line in start_lines(event):
                self._say(line, "dim")
        elif isinstance(event, Progress):
            self._progress = event if event.done < event.total else None
        elif isinstance(event, FirstStep):
            self._say(first_step_line(event), "dim")
        elif isinstance(event, StepLogged):
            self._pace, self._progress = event, None
        elif isinstance(event, EpochEnded):
            self._take_epoch(event)
        elif isinstance(event, Message):
            warning = event.level == "warning"
            self._say(f"warning: {event.text}" if warning else event.text, "yellow" if warning else "")
        elif isinstance(event, RunEnded):
            self._progress = None
            self._stop()
            self._say(end_line(event, ON_FINISH.option), "bold")

    def close(self) -> None:
        """Ends the drawing and gives the terminal back with its cursor, whatever happened; may be called twice."""
        self._stop()

    def _stop(self) -> None:
        if not self._live.is_started:
            return
        try:
            # Not left out where the view is silent: rich also has to give sys.stderr back.
            with contextlib.suppress(*_GONE):
                self._live.stop()
        finally:
            # Written past rich as well, whose own attempt may have failed half-way.
            with contextlib.suppress(*_GONE):
                self._console.file.write(_SHOW_CURSOR)
                self._console.file.flush()

    def _take_epoch(self, event: EpochEnded) -> None:
        self._pace, self._progress = event, None
        if event.validation is not None:
            self._scores = event.validation
            if event.is_best and event.validation.headline is not None:
                self._best = (event.validation.headline, event.epoch)

    def _say(self, text: str, style: str) -> None:
        # Text, not markup: a file name may hold square brackets.
        self._attempt(lambda: self._console.print(Text(one_line(text), style=style), soft_wrap=False))

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._silent:
            return
        try:
            action()
        except _GONE:
            self._silent = True

    def _draw(self) -> RenderableType:
        rows: list[RenderableType] = []
        # Read once: the refresh thread draws while the training thread goes on.
        run, pace, scores, progress = self._run, self._pace, self._scores, self._progress
        if pace is not None:
            rows.append(self._epoch_bar(run, pace))
            rows.append(_pace_text(pace))
        elif progress is None:
            rows.append(Text("starting …" if run is None else "preparing …", style="dim"))
        if scores is not None:
            rows.append(self._scores_text(scores))
        if progress is not None:
            name = f"{progress.what}: {progress.within}" if progress.within else progress.what
            rows.append(_bar(one_line(name), progress.done, progress.total))
        return Group(*rows)

    def _epoch_bar(self, run: RunStarted | None, pace: StepLogged | EpochEnded) -> RenderableType:
        if run is None:
            return Text(f"epoch {pace.epoch}")
        steps = run.steps_per_epoch
        done = pace.step_in_epoch if isinstance(pace, StepLogged) else steps
        return _bar(f"epoch {pace.epoch}/{run.epochs}", done, steps)

    def _scores_text(self, scores: ValidationFigures) -> Text:
        name, unit = ("dice ", "") if scores.dose_score is None else ("dose score ", " Gy")
        text = Text.assemble((name, "dim"), (f"{score_text(scores.headline, 3)}{unit}", "bold"))
        if self._best is not None:
            text.append(f"  best {self._best[0]:.3f} in epoch {self._best[1]}", style="dim")
        if scores.dvh_score is not None:
            text.append(f"  DVH score {scores.dvh_score:.3f} Gy", style="dim")
        if scores.slice_dice is not None:
            text.append(f"  of slices {scores.slice_dice:.3f}", style="dim")
        if scores.hd95 is not None:
            text.append(f"  hd95 {scores.hd95:.1f} mm", style="dim")
        for index, (name, value) in enumerate((scores.dice_by_class or scores.dvh_by_structure).items()):
            text.append("\n  " if index == 0 else "  ")
            text.append(f"{one_line(name)} ", style="dim")
            text.append(score_text(value, 2))
        return text


def _pace_text(pace: StepLogged | EpochEnded) -> Text:
    loss = pace.loss if isinstance(pace, StepLogged) else pace.train_loss
    pairs = [("step", str(pace.step)), ("loss", loss_text(loss)), ("lr", scientific_text(pace.learning_rate))]
    pairs += [("", rate_text(pace.patches_per_second)), ("waiting", share_text(pace.wait_share))]
    device = device_text(pace)
    if device is not None:
        pairs.append(("", device))
    if pace.seconds_left is not None:
        pairs.append(("left", duration_text(pace.seconds_left)))
    whole = hours_text(pace.projected_hours, pace.projected_cost)
    if whole is not None:
        pairs.append(("", whole))
    text = Text()
    for index, (name, value) in enumerate(pairs):
        # Words of a pair hold together where the line is broken.
        text.append("  " if index else "")
        text.append(f"{name}\N{NO-BREAK SPACE}" if name else "", style="dim")
        text.append(value.replace(" ", "\N{NO-BREAK SPACE}"))
    return text


def _bar(name: str, done: int, total: int) -> Table:
    """A name, a bar as wide as the terminal allows, and a count; one line at any width."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(ratio=1, min_width=4)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_row(name, ProgressBar(total=max(total, 1), completed=min(done, total)), f"{done}/{total}")
    return grid

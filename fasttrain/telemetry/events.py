"""Owns what a run reports while it goes on: one small value a happening, handed to every observer in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RunStarted:
    """The plan is made and the run folder claimed. `resumed_step` is None for a new run."""

    run: str
    recipe: str
    device: str
    epochs: int
    steps_per_epoch: int
    training_cases: int
    validation_cases: int
    decisions: tuple[tuple[str, str, str], ...] = ()
    """(name, value, reason) of each decision of the plan."""
    resumed_step: int | None = None
    skipped_cases: tuple[str, ...] = ()
    """Names of the faulty cases that `data.bad_cases: skip` left out."""
    outline: str = ""
    """Network, parameters, loss, optimiser and schedule in a few words."""
    began: float | None = None
    """When the process of this attempt began, in Unix seconds."""
    price_per_hour: float | None = None
    """USD, where the user said so."""
    limits: str = ""
    """What may end the run before its last epoch, in words."""
    limit_options: str = ""
    """The same as on a command line."""
    earlier_seconds: float = 0.0
    """Of the attempts before this one, so that each start tells of all of them: a log may be lost."""
    earlier_cost: float | None = None
    """The same in USD, where the price is known."""


@dataclass(frozen=True)
class Progress:
    """Work outside the training loop: reading and caching cases, validating, plotting. `done` of `total` items.

    `within`: how far the item under way has come, where it takes long by itself, such as `case_7, 12 of 96 windows`.
    """

    what: str
    done: int
    total: int
    within: str = ""


@dataclass(frozen=True)
class FirstStep:
    """The first step of this session is taken, `seconds` after its process began; parts: those of `start_clock.PARTS`."""

    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class StepLogged:
    """Figures of the steps since the last log (a window of them, never read step by step)."""

    epoch: int
    step: int
    step_in_epoch: int
    loss: float
    learning_rate: float
    patches_per_second: float
    wait_share: float
    gpu_utilisation: float | None = None
    gpu_gib: float | None = None
    seconds_left: float | None = None
    projected_hours: float | None = None
    """What the whole run will have taken at its last epoch, over all its attempts, validations counted in."""
    projected_cost: float | None = None
    """The same in USD, where the price is known."""


@dataclass(frozen=True)
class EpochEnded:
    """One row of `metrics.csv`; `validation` is None in epochs that did not validate."""

    epoch: int
    step: int
    seconds: float
    train_loss: float
    learning_rate: float
    patches_per_second: float
    wait_share: float
    gpu_utilisation: float | None = None
    gpu_gib: float | None = None
    validation: ValidationFigures | None = None
    is_best: bool = False
    seconds_left: float | None = None
    projected_hours: float | None = None
    projected_cost: float | None = None


@dataclass(frozen=True)
class ValidationFigures:
    """Scores over the validation cases. Per-class values are None where no case counted.

    dose_score, dvh_score, dvh_by_structure: in Gy, of `task: dose`, which has no Dice; lower is better.
    """

    dice: float | None
    dice_by_class: dict[str, float | None]
    dice_counts: dict[str, int]
    hd95: float | None = None
    hd95_by_class: dict[str, float | None] = field(default_factory=dict)
    hd95_penalised: dict[str, int] = field(default_factory=dict)
    """Cases of a class scored with the volume's diagonal, since the structure was missed or invented."""
    seconds: float = 0.0
    cases: int = 0
    dose_score: float | None = None
    dvh_score: float | None = None
    dvh_by_structure: dict[str, float | None] = field(default_factory=dict)
    slice_dice: float | None = None
    """With `data.slices`, the mean over slices beside that over volumes, by which a run is judged."""
    slice_dice_by_class: dict[str, float | None] = field(default_factory=dict)

    @property
    def headline(self) -> float | None:
        """The figure by which a run is judged: the mean Dice, or the dose score."""
        return self.dice if self.dose_score is None else self.dose_score


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint lies on the disk, whole. `seconds`: how long it took to write; `pause_seconds`: how long training waited."""

    path: str
    epoch: int
    step: int
    seconds: float
    mib: float
    pause_seconds: float = 0.0


@dataclass(frozen=True)
class Message:
    """One sentence for the person at the terminal; `level` is `info` or `warning`."""

    text: str
    level: str = "info"


@dataclass(frozen=True)
class RunEnded:
    """The run is over; `status` is `done`, `stopped` or `failed`, and `stopped_by` the reason of a stop."""

    status: str
    stopped_by: str | None
    exit_code: int
    best_metric: str | None
    best_value: float | None
    best_epoch: int | None
    seconds: float
    run: str
    resume_command: str | None = None
    run_hours: float | None = None
    """Of all attempts at this run."""
    run_cost: float | None = None


Event = RunStarted | Progress | FirstStep | StepLogged | EpochEnded | CheckpointSaved | Message | RunEnded


class Observer(Protocol):
    """Anything that wants to hear of a run: files, a live view, a notebook."""

    def on_event(self, event: Event) -> None:
        """Takes one event; must not raise for an event it does not know."""

    def close(self) -> None:
        """The run is over, however it ended."""


def as_record(event: Event) -> dict[str, Any]:
    """The event as plain values for JSON, its class name under `event`."""
    from dataclasses import asdict

    return {"event": type(event).__name__, **asdict(event)}

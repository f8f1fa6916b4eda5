"""Owns the options by which a run ends itself, and those that say what follows; for `train`, `resume` and `tune` alike."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from fasttrain.engine.limits import Limits
from fasttrain.errors import RecipeError
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.attempts import former_limits

MaxHoursOption = Annotated[
    str | None,
    typer.Option(
        "--max-hours",
        help="End, saved and with exit code 0, after so many hours, such as 2, 2h or 90m: of this process, with --resume auto of "
        "the whole run.",
        metavar="H",
    ),
]
MaxCostOption = Annotated[
    float | None,
    typer.Option(
        "--max-cost",
        help="End so when the run, all its attempts counted, has cost so much; needs --price-per-hour.",
        metavar="USD",
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour", help="What an hour of this machine costs, in USD: cost is then shown.", metavar="P"
    ),
]
UntilDiceOption = Annotated[
    float | None,
    typer.Option(
        "--until-dice",
        help="End so when a validation's mean Dice reaches D, or its dose score (Gy) is down to D.",
        metavar="D",
    ),
]
OnFinishOption = Annotated[
    str | None,
    typer.Option(
        "--on-finish",
        help="A command for the shell that is run after every end but 143, failures included, or stop-pod: stop this RunPod pod "
        "(its volume is still billed). It never changes the exit code.",
        metavar="CMD|stop-pod",
    ),
]
_OPTION = re.compile(r"(--[a-z-]+) (\S+)")


def read_limits(
    max_hours: str | None,
    max_cost: float | None,
    price_per_hour: float | None,
    until_dice: float | None,
    of_run: bool = False,
) -> Limits:
    """What the options say; of_run: hours are those of all attempts. Raises RecipeError for what can be no limit."""
    return Limits(_read_hours(max_hours), max_cost, price_per_hour, until_dice, of_run)


def _read_hours(text: str | None) -> float | None:
    """`2`, `2h`, `90m` or `5400s` in hours; the range of a plain number is for Limits to look at."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        from fasttrain.studies.options import read_seconds

        try:
            seconds = read_seconds("--max-hours", text)
        except RecipeError as error:
            raise RecipeError(f"--max-hours {text}: should be hours or a time, such as 2, 1.5, 2h or 90m") from error
        return None if seconds is None else seconds / 3600


def tell_dropped(folder: RunFolder, limits: Limits) -> str | None:
    """A sentence about the limits of the run's last attempt that are not given now: they belong to a command, not to the run."""
    given = dict(_OPTION.findall(limits.options))
    former = _OPTION.findall(former_limits(folder.path))
    dropped = [(name, value) for name, value in former if name not in given]
    if not {name for name, _ in dropped} - {"--price-per-hour"}:
        return None
    words = " ".join(f"{name} {value}" for name, value in dropped)
    return f"limits belong to the command: {words} of the last one is not given now and ends nothing; to keep it, give it again"

"""Owns the options by which a run ends itself, and those that say what follows; for `train` and `resume` alike."""

from __future__ import annotations

from typing import Annotated

import typer

MaxHoursOption = Annotated[
    float | None,
    typer.Option(
        "--max-hours", help="End, saved and with exit code 0, after so many hours of this process.", metavar="H"
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

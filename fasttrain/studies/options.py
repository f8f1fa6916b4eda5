"""Owns what a user may ask of a study: preferences, limits and ranges, read from the command line's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fasttrain.errors import RecipeError
from fasttrain.recipe.names import did_you_mean
from fasttrain.recipe.run_spec import parse_interval
from fasttrain.studies.choice import PREFERENCES

UNIVERSAL = "universal"
_KINDS = ("unet", "dynunet", "segresnet", "swinunetr", "monai")


@dataclass(frozen=True)
class Options:
    """See `--help`. budget_seconds None: what the device's default is; margin: share of the GPU's memory that is to stay free;
    ranks: processes that take the steps of a trial together.
    """

    prefer: str = "throughput"
    margin: float = 0.08
    trials: int = 12
    sizes: tuple[int, ...] | None = None
    budget_seconds: float | None = None
    trial_seconds: float = 120.0
    window_batches: tuple[int, ...] | None = None
    stitching: tuple[str, ...] | None = None
    workers: tuple[int, ...] | None = None
    prefetch: tuple[int, ...] | None = None
    caches: tuple[str, ...] | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        faults = []
        if self.prefer not in PREFERENCES:
            faults.append(f"--prefer {self.prefer}: there is no such preference; there are {', '.join(PREFERENCES)}")
        if not 0 <= self.margin < 1:
            faults.append(f"--margin {self.margin:g}: should be a share of the memory, from 0 to below 1")
        if self.trials < 1:
            faults.append(f"--trials {self.trials}: should be at least 1")
        if self.trial_seconds <= 0:
            faults.append(f"--trial-time {self.trial_seconds:g}s: should be above 0")
        if faults:
            raise RecipeError(faults)


def read_seconds(option: str, text: str | None) -> float | None:
    """`90s`, `3m` or `1h` in seconds; raises RecipeError for anything else."""
    if text is None:
        return None
    try:
        interval = parse_interval(text)
    except ValueError as error:
        raise RecipeError(f"{option} {text}: should be a time such as 90s, 3m or 1h") from error
    if interval.unit != "seconds":
        raise RecipeError(f"{option} {text}: should be a time such as 90s, 3m or 1h")
    return interval.amount


def read_numbers(option: str, texts: Sequence[str] | None, kind: str, least: int = 1) -> tuple[int, ...] | None:
    """The whole numbers that apply to networks of a kind; see `read_words`."""
    words = read_words(option, texts, kind)
    if words is None:
        return None
    wrong = [
        word for word in words if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) >= least)
    ]
    if wrong:
        raise RecipeError([f"{option} {word}: should be a whole number of at least {least}" for word in wrong])
    return tuple(sorted({int(word) for word in words}))


def read_words(
    option: str, texts: Sequence[str] | None, kind: str, among: Sequence[str] | None = None
) -> tuple[str, ...] | None:
    """The values that apply to networks of `kind`: `KIND:1,2,4` is for these alone and goes before `1,2,4` or `universal:1,2,4`,
    which is for all. None where nothing applies. Raises RecipeError for an unknown kind or value, and for an empty list.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for text in texts or ():
        name, colon, values = text.rpartition(":")
        name = name if colon else UNIVERSAL
        if name not in (UNIVERSAL, *_KINDS):
            raise RecipeError(f"{option} {text}: {name!r} is no network.kind{did_you_mean(name, (UNIVERSAL, *_KINDS))}")
        words = tuple(word.strip() for word in values.split(",") if word.strip())
        if not words:
            raise RecipeError(f"{option} {text}: should be a list such as 1,2,4")
        wrong = [word for word in words if among is not None and word not in among]
        if wrong:
            raise RecipeError(
                [f"{option} {word}: there is no such choice{did_you_mean(word, among or ())}" for word in wrong]
            )
        chosen[name] = words
    return chosen.get(kind, chosen.get(UNIVERSAL))

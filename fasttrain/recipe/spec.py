"""Owns the base of every recipe section: unknown keys are refused and values do not change once read."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Spec(BaseModel):
    """A section of a recipe."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _as_switch(value: object) -> object:
    """`true`/`false`, `yes`/`no` and `on`/`off` mean the same, as they do where a key is a plain boolean.

    YAML 1.2 reads the first pair as booleans and the others as strings.
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    return _SPELLINGS.get(value.lower(), value) if isinstance(value, str) else value


_SPELLINGS = {"yes": "on", "true": "on", "on": "on", "no": "off", "false": "off", "off": "off"}


def _as_off(value: object) -> object:
    """For a choice that can be `off` but not simply `on`."""
    return "off" if _as_switch(value) == "off" else value


def _as_folder_name(value: str) -> str:
    if not value.strip() or value in (".", "..") or any(char in "/\\" or not char.isprintable() for char in value):
        raise ValueError(f"names a folder, so it should be printable text without / or \\, found {value!r}")
    return value


def _no_switch(value: object) -> object:
    """Python counts `true` as 1, so `batch_size: true` or `deep_supervision: on` would be taken for a number in silence."""
    if isinstance(value, bool):
        raise ValueError(f"should be a number, found {str(value).lower()}")
    return value


def _spelt_switch(value: object) -> object:
    """Python counts `true` as 1, which a choice among names and numbers may have."""
    return str(value).lower() if isinstance(value, bool) else value


FolderName = Annotated[str, AfterValidator(_as_folder_name)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_switch)]
OrOff = BeforeValidator(_as_off)
"""For a choice among names and `off`: the other spellings of `off` are taken too."""
NoSwitch = BeforeValidator(_spelt_switch)
"""For a choice among names and numbers."""
Int = Annotated[int, BeforeValidator(_no_switch)]
Float = Annotated[float, BeforeValidator(_no_switch)]
Probability = Annotated[Float, Field(ge=0.0, le=1.0)]
MOST = 10**9
"""More than anything a recipe counts, and few enough for every library that counts with it."""
PositiveInt = Annotated[Int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[Int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[Float, Field(gt=0.0)]
NonNegativeFloat = Annotated[Float, Field(ge=0.0)]
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
"""What NumPy's and torch's generators both take."""

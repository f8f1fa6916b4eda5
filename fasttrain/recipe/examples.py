"""Owns an example of a value inside a section, for a sentence about a section that was given a single value."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WRITTEN_OUT = {
    "epochs": "20",
    "batch_size": "2",
    "patience": "10",
    "size": "[64, 64, 64]",
    "channels": "[CT]",
    "features": "[16, 32, 64]",
    "low": "-150",
    "probability": "0.5",
}
"""Of keys that have no default."""


def example_in(models: Sequence[type[BaseModel]], given: Any) -> str | None:
    """`decay=0.999`: a key of the section and a value that it may have; None where the section has no such key.

    `models` are the classes that the section can be. Where it has a `kind` and `given` names one, that is the example.
    """
    kinds = [kind for model in models if "kind" in model.model_fields for kind in _choices(model.model_fields["kind"])]
    if kinds:
        default = models[0].model_fields["kind"].default
        fitting = given if given in kinds else default if default in kinds else kinds[0]
        return f"kind={fitting}"
    for name, field in models[0].model_fields.items() if models else ():
        inside = list(models_in(field.annotation))
        if inside and (example := example_in(inside, None)) is not None:
            return f"{name}.{example}"
        if not inside and (value := _value(name, field)) is not None:
            return f"{name}={value}"
    return None


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections' classes that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for part in typing.get_args(annotation):
            yield from models_in(part)


def _value(name: str, field: FieldInfo) -> str | None:
    if field.is_required():
        return _WRITTEN_OUT.get(name)
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        return f"{default:g}"
    # A value with spaces would need quotes in a shell
    return default if isinstance(default, str) and default and " " not in default else None


def _choices(field: FieldInfo) -> tuple[Any, ...]:
    return typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()

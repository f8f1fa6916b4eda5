"""Owns the list of all keys that a recipe may have, read off the classes that check them, so that it cannot be out of date."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fasttrain.errors import RecipeError
from fasttrain.recipe.examples import models_in
from fasttrain.recipe.names import did_you_mean
from fasttrain.recipe.recipe import Recipe
from fasttrain.recipe.spec import MOST


@dataclass(frozen=True)
class Key:
    """One key: its dotted path (`loss[dice_ce].dice_weight` where it belongs to one kind), what it takes, its default."""

    path: str
    takes: str
    default: str


@dataclass(frozen=True)
class Section:
    """A group of keys with what its class says about it."""

    path: str
    about: str
    keys: tuple[Key, ...]


def sections(within: str = "") -> list[Section]:
    """All sections, or those at and below the dotted path `within`; raises RecipeError with near names for an unknown path."""
    every = list(_sections_of(Recipe, ""))
    found = [section for section in every if not within or _lies_in(section.path, within)]
    if not found:
        # A key by itself, with what its section says
        chosen = [
            (one, tuple(key for key in one.keys if _plain(key.path) == within or key.path == within)) for one in every
        ]
        found = [Section(one.path, one.about, keys) for one, keys in chosen if keys]
    if not found:
        names = sorted({section.path.split("[")[0] for section in every if section.path})
        raise RecipeError(f"a recipe has no section {within!r}{did_you_mean(within, names)}")
    return found


def _plain(path: str) -> str:
    """`loss[dice].smooth` as a recipe spells it, `loss.smooth`."""
    return re.sub(r"\[\w+\]", "", path)


def _lies_in(path: str, within: str) -> bool:
    return path == within or path.startswith((f"{within}.", f"{within}["))


def _sections_of(model: type[BaseModel], path: str) -> Iterator[Section]:
    keys: list[Key] = []
    below: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        inner = f"{path}.{name}" if path else name
        models = list(models_in(field.annotation))
        if not models:
            keys.append(Key(inner, _takes(field.annotation, field.metadata), _default(field)))
        elif len(models) == 1:
            below.append((inner, models[0]))
        else:
            below.extend((f"{inner}[{_kind(one)}]", one) for one in models)
    about = " ".join((model.__doc__ or "").split())
    yield Section(path, about, tuple(keys))
    for inner, one in below:
        yield from _sections_of(one, inner)


def _kind(model: type[BaseModel]) -> str:
    return str(typing.get_args(model.model_fields["kind"].annotation)[0])


_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}


def _takes(annotation: Any, metadata: typing.Sequence[Any] = ()) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _takes(parts[0], parts[1:])
    if origin is typing.Literal:
        return " | ".join(map(str, parts))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_takes(part) for part in parts)
    bounds = "".join(_bounds(metadata))
    if origin is tuple:
        return f"list of: {_takes(parts[0])}{bounds and ';' + bounds}"
    if origin is dict:
        return f"{_takes(parts[0])}: {_takes(parts[1])}, …{bounds}"
    return f"{_NAMES.get(annotation, 'value')}{bounds}"


_SIGNS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"), ("min_length", "at least"), ("max_length", "at most"))


def _bounds(metadata: typing.Sequence[Any]) -> Iterator[str]:
    for item in metadata:
        # pydantic's Field keeps what it was given in a list of its own; annotated_types' bounds are plain attributes
        for one in getattr(item, "metadata", None) or (item,):
            for name, sign in _SIGNS:
                if getattr(one, name, None) not in (None, MOST):
                    bound = getattr(one, name)
                    yield f" {sign} {bound:g}" if isinstance(bound, float) else f" {sign} {bound}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value == "":
        return '""'
    return str(list(value)) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)

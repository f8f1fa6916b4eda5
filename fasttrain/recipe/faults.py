"""Owns how what pydantic found becomes sentences with YAML paths, tags of unions left out and near names offered."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from fasttrain.recipe.examples import example_in, models_in
from fasttrain.recipe.names import did_you_mean

Path = tuple[str | int, ...]


def dotted(path: Path) -> str:
    """`data.split.fold`, with list positions as `patch.size[0]`."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) and text else (f".{key}" if text else str(key))
    return text or "the recipe"


def sentences(error: ValidationError, raw: Any, root: type[BaseModel]) -> list[tuple[Path, str]]:
    """Every fault with its path in `raw`; faults at one path that come from the branches of a union are one sentence."""
    found: dict[Path, list[str]] = {}
    for item in error.errors(include_url=False):
        path = _path_in(raw, item["loc"], missing=item["type"] in ("missing", "union_tag_not_found"))
        found.setdefault(path, [])
        text = _sentence(item, path, raw, root)
        if text not in found[path]:
            found[path].append(text)
    return [(path, ", or ".join(texts)) for path, texts in found.items()]


def _path_in(raw: Any, location: Sequence[str | int], missing: bool) -> Path:
    """Drops what pydantic adds to a location for the branch of a union: it is no key of the recipe."""
    path: list[str | int] = []
    node = raw
    passed: Any = None
    for position, key in enumerate(location):
        last = position == len(location) - 1
        if isinstance(node, Mapping):
            # A branch is named once: after that the same word is a key
            if key == node.get("kind") and passed is not node and not (last and missing):
                passed = node
                continue
            if key in node or (last and missing):
                path.append(key)
                node = node.get(key)
        elif isinstance(node, list | tuple) and isinstance(key, int) and key < len(node):
            path.append(key)
            node = node[key]
    return tuple(path)


def _sentence(item: Any, path: Path, raw: Any, root: type[BaseModel]) -> str:
    kind, context, found = item["type"], item.get("ctx", {}), item.get("input")
    if kind == "extra_forbidden":
        return f"no such key{did_you_mean(str(path[-1]), fields_at(path[:-1], raw, root))}"
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_not_found":
        return f"needs a `kind`: one of {', '.join(_kinds_at(path, root))}"
    if kind == "union_tag_invalid":
        names = [name.strip(" '") for name in str(context["expected_tags"]).split(",")]
        return f"there is no kind {context['tag']!r}{did_you_mean(str(context['tag']), names)}"
    if kind == "literal_error":
        names = [name.strip(" '") for name in str(context["expected"]).replace(" or ", ",").split(",")]
        if isinstance(found, bool):
            return f"found {str(found).lower()}, expected one of {', '.join(names)}"
        return f"found {found!r}, expected one of {', '.join(names)}{_only_near(str(found), names)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("too_short", "too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        bound = f"at least {least}" if kind == "too_short" else f"at most {most}"
        many = "value" if (least if kind == "too_short" else most) == 1 else "values"
        return f"should have {bound} {many}, found {context['actual_length']}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        example = example_in(_models_at(path, root), found)
        return f"should hold keys and values{f', such as {dotted(path)}.{example}' if example else ''}, found {_shown(found)}"
    text = item["msg"].replace("Input should be", "should be").replace("a valid tuple", "a list")
    return f"{text[0].lower()}{text[1:]}, found {_shown(found)}"


def _shown(value: Any) -> str:
    """The value as YAML spells it, where Python's spelling would be none of the user's."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if not isinstance(value, Mapping | list) or len(repr(value)) < 60 else type(value).__name__


def _only_near(name: str, names: list[str]) -> str:
    hint = did_you_mean(name, names)
    return hint if "did you mean" in hint else ""


def _kinds_at(path: Path, root: type[BaseModel]) -> list[str]:
    """The kinds that the section at `path` can have, also where it is an entry under a key of the user's own."""
    models = _models_at(path, root)
    if not models and len(path) > 1:
        tables = [model.model_fields.get(str(path[-2])) for model in _models_at(path[:-2], root)]
        values = [part for table in tables if table is not None for part in typing.get_args(table.annotation)]
        models = [model for value in values for model in models_in(value)]
    fields = [model.model_fields["kind"] for model in models if "kind" in model.model_fields]
    return [str(kind) for field in fields for kind in typing.get_args(field.annotation)]


def fields_at(path: Path, raw: Any, root: type[BaseModel]) -> list[str]:
    """The keys that the section at `path` may have."""
    model: type[BaseModel] | None = root
    node = raw
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
        if model is None or key not in model.model_fields:
            return []
        model = _model_of(model.model_fields[str(key)].annotation, node)
    return list(model.model_fields) if model is not None else []


def _models_at(path: Path, root: type[BaseModel]) -> list[type[BaseModel]]:
    """The classes that the section at `path` can be; [] for one that is a table of the user's own keys."""
    models = [root]
    for key in path:
        fields = [model.model_fields[str(key)] for model in models if str(key) in model.model_fields]
        models = [model for field in fields for model in models_in(field.annotation)]
    return models


def _model_of(annotation: Any, node: Any) -> type[BaseModel] | None:
    """The section's class behind Annotated, Optional and unions told apart by `kind`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) is typing.Annotated:
        return _model_of(typing.get_args(annotation)[0], node)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        choices = [model for part in typing.get_args(annotation) if (model := _model_of(part, node)) is not None]
        kind = node.get("kind") if isinstance(node, Mapping) else None
        for model in choices:
            field = model.model_fields.get("kind")
            if field is None or kind in typing.get_args(field.annotation):
                return model
    return None

"""Owns YAML 1.2 as fasttrain reads and writes it: safe values only, faults by line and column."""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from fasttrain.errors import RecipeError

_MOST_VALUES = 100_000
# Other text is written in double quotes: ruamel leaves `: -` bare in a list and folds U+0085 into a space
_PLAIN = re.compile(r"(?:\w[\w ./()+%-]*)?")


def _reader() -> YAML:
    # The pure reader is the YAML 1.2 one: in 1.1 `off` is a boolean and `2e-4` a string.
    return YAML(typ="safe", pure=True)


def parse(text: str, source: str) -> Any:
    """The values in `text`; raises RecipeError with `source`, line and column where it is not YAML."""
    try:
        return _unshared(_reader().load(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = " ".join(str(error.problem or error.context or "not YAML").split())
        raise RecipeError(f"{source}{where}: not valid YAML: {problem}") from error
    except RecursionError as error:
        raise RecipeError(f"{source}: not valid YAML: nested too deeply, or an alias inside its own anchor") from error
    except (YAMLError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


def _unshared(value: Any) -> Any:
    """A tree: what an alias names is copied, so that a change at one place is none at the other."""
    left = _MOST_VALUES

    def copied(part: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {_MOST_VALUES:,} values, counting those that aliases repeat")
        if isinstance(part, dict):
            return {key: copied(item) for key, item in part.items()}
        return [copied(item) for item in part] if isinstance(part, list) else part

    return copied(value)


def line_of(text: str, path: tuple[str | int, ...]) -> tuple[int, int] | None:
    """The line (from 1) on which the value at `path` begins, or its nearest parent that is there, and the keys it took."""
    node = _reader().compose(io.StringIO(text))
    found = None
    for depth, key in enumerate(path, start=1):
        children = _children(node)
        if str(key) not in children:
            break
        line, node = children[str(key)]
        found = line, depth
    return found


def _children(node: Any) -> dict[str, tuple[int, Any]]:
    if node is None or isinstance(node.value, str):
        return {}
    if node.id == "mapping":
        return {str(key.value): (key.start_mark.line + 1, value) for key, value in node.value}
    return {str(index): (item.start_mark.line + 1, item) for index, item in enumerate(node.value)}


def write(values: dict[str, Any], origins: dict[tuple[str | int, ...], str], heading: str) -> str:
    """Block-style YAML of `values` with each leaf's origin as a comment at the end of its line."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    def convert(value: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(value, dict) and value:
            mapping = CommentedMap()
            for key, item in value.items():
                here = (*path, key)
                mapping[key] = convert(item, here)
                if here in origins and not (isinstance(item, dict) and item):
                    mapping.yaml_add_eol_comment(origins[here], key, column=48)
            return mapping
        if isinstance(value, list | tuple):
            sequence = CommentedSeq(convert(item, (*path, index)) for index, item in enumerate(value))
            sequence.fa.set_flow_style()
            return sequence
        if isinstance(value, str) and not _PLAIN.fullmatch(value):
            return DoubleQuotedScalarString(value)
        return value

    writer = YAML()
    writer.width = 4096
    writer.representer.add_representer(type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null"))
    root = convert(values, ())
    root.yaml_set_start_comment(heading)
    stream = io.StringIO()
    writer.dump(root, stream)
    return stream.getvalue()

"""Owns the pieces of commented YAML: wrapped comments, scalars that read as they are, lists and sections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import wrap

_WIDTH = 118
_PLAIN = re.compile(r"[A-Za-z][\w/-]*", re.ASCII)
_WORDS = ("true", "false", "null", "yes", "no", "on", "off")


def quoted(text: str) -> str:
    """A YAML scalar that reads as exactly this text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in escaped) + '"'


def size_text(lengths: Iterable[float]) -> str:
    """`40×56×40`."""
    return "×".join(f"{length:.4g}" if isinstance(length, float) else str(length) for length in lengths)


def comment(text: str, indent: int = 2) -> str:
    """A comment on as many lines as it takes."""
    clean = "".join(char if char.isprintable() else " " for char in text)
    space = " " * indent
    return "\n".join(
        f"{space}# {line}" for line in wrap(clean, _WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    )


def line(text: str) -> str:
    """A comment that is not wrapped, for what is copied as a whole."""
    return "# " + "".join(char if char.isprintable() else " " for char in text)


def section(key: str, *lines: str) -> str:
    """A top-level key over lines that are indented already."""
    return "\n".join([f"{key}:", *lines])


def numbers(values: Iterable[float]) -> str:
    """A list on one line."""
    return "[" + ", ".join(number(value) for value in values) + "]"


def number(value: float) -> str:
    """Whole numbers as they are, others with up to six digits."""
    return repr(float(f"{value:.6g}")) if isinstance(value, float) else str(value)

"""Owns what is said of a command line that its parser refuses, where what was meant is another way to say it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_OF_A_RUN = ("resume", "evaluate", "predict", "monitor", "report")


def hint(message: str, arguments: Sequence[str]) -> str:
    """A half-sentence such as `` `fasttrain resume RUN` names the run ``; empty where nothing is known.

    message: the parser's, in one line; arguments: the whole command line behind `fasttrain`.
    """
    command, *words = [*arguments, "", ""]
    text = message.lower()
    if text.startswith("no such option: --run") and command in _OF_A_RUN:
        after = words[words.index("--run") + 1] if "--run" in words else ""
        after = after or next((word.partition("=")[2] for word in words if word.startswith("--run=")), "")
        return f"the run is named without it: `fasttrain {command} {shlex.quote(after) if after else 'RUN'}`"
    if text.startswith("missing option '--recipe'") and words[0] and not words[0].startswith("-"):
        return f"a recipe is named by it: `fasttrain {command} --recipe {shlex.quote(words[0])}`"
    if text.startswith("option '--resume' requires an argument"):
        return "`--resume auto` begins the run and goes on with it ever after; `fasttrain resume RUN` goes on with a run of yours"
    return ""

"""Owns `summary.json`: how a run ended, in one small document for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fasttrain.telemetry.strict_json import dumps
from fasttrain.whole_files import write_whole

_BEST = ("metric", "value", "epoch")
_SECONDS = ("total", "to_first_step", "start", "training", "validation")


def write_summary(
    path: Path,
    *,
    status: str,
    stopped_by: str | None,
    exit_code: int,
    best: Mapping[str, object] | None = None,
    seconds: Mapping[str, float | Mapping[str, float] | None] | None = None,
    **more: object,
) -> None:
    """Writes `summary.json` whole.

    status: `done`, `stopped` or `failed`; stopped_by: the reason of a stop. best: `metric`, `value`, `epoch`; seconds:
    `total`, `to_first_step`, `start` (its parts by name), `training`, `validation`. Both always have all their keys in the file,
    null where nothing is known, so that a script can ask for `.best.value` of any run. Further fields follow as they are. Raises
    StorageError where the file cannot be written, TypeError for a key of best or seconds that is not of the format.
    """
    document = {
        "status": status,
        "stopped_by": stopped_by,
        "best": _filled("best", _BEST, best),
        "seconds": _filled("seconds", _SECONDS, seconds),
        "exit_code": exit_code,
        **more,
    }
    with write_whole(path) as file:
        file.write((dumps(document, indent=2) + "\n").encode())


def _filled(name: str, keys: tuple[str, ...], given: Mapping[str, object] | None) -> dict[str, object]:
    given = given or {}
    unknown = sorted(set(given) - set(keys))
    if unknown:
        raise TypeError(f"{name} has {', '.join(unknown)}; its keys are {', '.join(keys)}")
    return {key: given.get(key) for key in keys}

"""Owns the scores of the cases that the summary of an earlier session still holds."""

from __future__ import annotations

from typing import Any

from fasttrain.run_folder import RunFolder


def former_scores(folder: RunFolder, step: int, key: str = "cases") -> dict[str, Any]:
    """Those in the summary that stands, where it is of this very step; else none."""
    former = folder.read_summary()
    cases = former.get(key) if former.get("steps") == step else None
    return dict(cases) if isinstance(cases, dict) else {}

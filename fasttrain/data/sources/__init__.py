"""Owns where cases come from: one layout a file, by the `kind` of `data.source`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fasttrain.data.sources.decathlon import find_decathlon
from fasttrain.data.sources.dicom import find_dicom
from fasttrain.data.sources.folders import find_folders
from fasttrain.data.sources.found import FoundCases
from fasttrain.data.sources.nnunet import find_nnunet
from fasttrain.data.sources.openkbp import find_openkbp
from fasttrain.data.sources.phantom import find_phantoms
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec

SOURCES: dict[str, Callable[[DataSpec, Path], FoundCases]] = {
    "decathlon": find_decathlon,
    "nnunet": find_nnunet,
    "folders": find_folders,
    "dicom": find_dicom,
    "phantom": find_phantoms,
    "openkbp": find_openkbp,
}

__all__ = ["SOURCES", "FoundCases", "find_cases", "look_for_cases"]


def find_cases(spec: DataSpec, root: Path) -> FoundCases:
    """The labelled cases of the set under `root`, sorted by name; image and label are paired by id, never by order.

    Raises one DataError with every fault of the layout: a missing folder or file, an image without a label, a label without
    an image, a missing channel, no case at all.
    """
    found = look_for_cases(spec, root)
    if found.faults:
        raise DataError(fault for _, faults in sorted(found.faults.items()) for fault in faults)
    return found


def look_for_cases(spec: DataSpec, root: Path) -> FoundCases:
    """As `find_cases`, but the faults of single cases (a file that is missing, or is there twice) are in what is returned.

    Raises DataError where the layout as a whole is faulty or no case is complete.
    """
    if spec.source.kind != "phantom" and not root.is_dir():
        found = "is a file; a folder is expected" if root.exists() else "does not exist"
        raise DataError(f"{root} {found}; name the folder of the data set with --data")
    return SOURCES[spec.source.kind](spec, root)

"""Owns the import of the libraries that read DICOM, and what is said where they are missing."""

from __future__ import annotations

import importlib
import threading
import warnings
from typing import Any

from fasttrain.errors import MachineError

PACKAGES = ("pydicom", "highdicom", "pylibjpeg", "pylibjpeg-openjpeg", "pylibjpeg-libjpeg", "pylibjpeg-rle")
"""All that decide what a DICOM file is read as."""
_INSTALL = "install what is missing by `pip install 'fasttrain[dicom]'`"
_LOADING = threading.Lock()


def load(name: str, purpose: str) -> Any:
    """The module; raises MachineError where it is not installed. `purpose`: what needs it, to begin a sentence with."""
    with _LOADING:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise MachineError(
                f"{purpose} needs the package {name.split('.')[0]}, which is not installed; {_INSTALL}"
            ) from error
        if name == "pydicom":
            # What a file has against the standard is told where it matters, in a sentence; not as a warning of a library
            module.config.settings.reading_validation_mode = module.config.IGNORE
            warnings.filterwarnings("ignore", module=r"pydicom\.")
    return module


def missing_decoder(path: object, syntax: str) -> MachineError:
    """The error for pixels that no installed package can decompress."""
    return MachineError(f"{path} has pixels in {syntax}, which no installed package decodes; {_INSTALL}")

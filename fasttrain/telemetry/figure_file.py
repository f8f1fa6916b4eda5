"""Owns how a matplotlib figure becomes a PNG file: without pyplot, whole or not at all."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fasttrain.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes `figure` to `path` and returns that; raises StorageError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A class name in a script that the font lacks shows as boxes; that is no matter for the terminal
        warnings.simplefilter("ignore", UserWarning)
        FigureCanvasAgg(figure).print_png(picture, metadata={"Software": None})
    with write_whole(path) as file:
        file.write(picture.getvalue())
    return path

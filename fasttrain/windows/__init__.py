"""Owns how a network that sees patches is applied to whole volumes."""

from fasttrain.windows.answer import Answer, Forward, Sides, of_slices, sigmoid, softmax
from fasttrain.windows.layout import count_windows, lay_out
from fasttrain.windows.sliding_window import Told, WindowStream, predict_volume
from fasttrain.windows.stitching import Sink, Whole

__all__ = [
    "Answer",
    "Forward",
    "Sides",
    "Sink",
    "Told",
    "Whole",
    "WindowStream",
    "count_windows",
    "lay_out",
    "of_slices",
    "predict_volume",
    "sigmoid",
    "softmax",
]

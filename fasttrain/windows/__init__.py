"""Owns how a network that sees patches is applied to whole volumes."""

from fasttrain.windows.sliding_window import count_windows, predict_volume

__all__ = ["count_windows", "predict_volume"]

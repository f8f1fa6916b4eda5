"""Random changes of training patches, one technique a file; `augmenter` holds the table of them and their order."""

from fasttrain.augment.augmenter import INTENSITY, SPATIAL, Augmenter, Draws
from fasttrain.augment.chances import Chances

__all__ = ["INTENSITY", "SPATIAL", "Augmenter", "Chances", "Draws"]

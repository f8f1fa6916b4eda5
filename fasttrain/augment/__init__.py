"""Random changes of training patches, one technique a file; `augmenter` holds the table of them and their order."""

from fasttrain.augment.augmenter import INTENSITY, SPATIAL, Augmenter, Draws, stack

__all__ = ["INTENSITY", "SPATIAL", "Augmenter", "Draws", "stack"]

"""A recipe suggested for a folder of images, by nnU-Net's rules and the memory of the device, as commented YAML."""

from fasttrain.engine.suggest.suggesting import Suggestion, suggest

__all__ = ["Suggestion", "suggest"]

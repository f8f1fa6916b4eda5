"""A recipe suggested for a folder of images: what the set is like, what the device holds, and nnU-Net's rules, as commented YAML."""

from fasttrain.engine.suggest.suggesting import Suggestion, suggest

__all__ = ["Suggestion", "suggest"]

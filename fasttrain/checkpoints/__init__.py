"""Checkpoints: written whole with a checksum, read back only when they are sound."""

from fasttrain.checkpoints.read import ReadCheckpoint, newest_good, read_checkpoint
from fasttrain.checkpoints.write import write_checkpoint

__all__ = ["ReadCheckpoint", "newest_good", "read_checkpoint", "write_checkpoint"]

"""Checkpoints: copied between two steps, written whole with a checksum beside the training, read back only when sound."""

from fasttrain.checkpoints.read import ReadCheckpoint, furthest_good, newest_good, read_checkpoint
from fasttrain.checkpoints.snapshot import Snapshot, Snapshots
from fasttrain.checkpoints.write import checkpoint_bytes, free_bytes, write_checkpoint

__all__ = [
    "ReadCheckpoint",
    "Snapshot",
    "Snapshots",
    "checkpoint_bytes",
    "free_bytes",
    "furthest_good",
    "newest_good",
    "read_checkpoint",
    "write_checkpoint",
]

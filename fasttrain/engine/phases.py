"""Owns the phases of a run and what each held of the GPU's memory at most, by counters that are read without a wait."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fasttrain.machine.allocator import gpu_room_bytes

FILLING = "filling the cache"
BUILDING = "building the network"
FIRST_STEP = "the first step"
TRAINING = "training"
VALIDATION = "validation"
MEASURING = "measuring a training step"


@dataclass(frozen=True)
class GpuState:
    """The GPU's memory at a moment, in bytes.

    phase: what was under way. limit: what this process may have in all. base: what was held when the phase began, such as weights
    and resident volumes. peak: the most that was held in the phase. peaks: the most of each phase. volumes: of the base what
    resident volumes take. step: what a step alone holds where it was measured. stitching: what a validation holds whatever its
    batch.
    """

    phase: str
    limit: int
    base: int
    peak: int
    peaks: dict[str, int] = field(default_factory=dict)
    volumes: int = 0
    step: int = 0
    stitching: int = 0


class Phases:
    """Follows a run; without a GPU it knows the phase alone."""

    def __init__(self) -> None:
        self.now = "starting"
        self.peaks: dict[str, int] = {}
        self._device: torch.device | None = None
        self._base = 0

    def watch(self, device: torch.device) -> None:
        """From now on the memory of this device is followed, where it is a GPU."""
        self._device = device if device.type == "cuda" else None

    def enter(self, phase: str) -> None:
        """Ends the phase under way and begins another; of one that comes again the larger peak is kept."""
        self._note()
        self.now = phase
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)

    def state(self, phase: str, volumes: int = 0, step: int = 0, stitching: int = 0) -> GpuState | None:
        """The memory as it is now, with what else is known of it; None where there is no GPU to ask."""
        if self._device is None:
            return None
        self._note()
        try:
            free = gpu_room_bytes(self._device)
        except RuntimeError:
            # After some failures a GPU answers no more
            return None
        limit = free + torch.cuda.memory_reserved(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        return GpuState(phase, limit, self._base, peak, dict(self.peaks), volumes, step, stitching)

    def _note(self) -> None:
        if self._device is not None:
            peak = torch.cuda.max_memory_allocated(self._device)
            self.peaks[self.now] = max(peak, self.peaks.get(self.now, 0))

"""Owns what a task is: what is kept of a case, what a network answers, by which losses it learns and by which figure it is
judged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One value of a recipe's `task`. Everything that differs between tasks hangs on these figures and on `Recipe`'s channels.

    metric: the headline figure, `val_METRIC` in metrics.csv. label_bytes: of a voxel's label as it is kept. losses: the kinds
    that can train it.
    """

    metric: str
    metric_text: str
    lower_is_better: bool
    label_bytes: int
    losses: frozenset[str]

    def rising(self, value: float) -> float:
        """The headline figure as one that is the better the higher it is."""
        return -value if self.lower_is_better else value

    def better(self, value: float, best: float | None) -> bool:
        """Whether a figure is better than the best so far."""
        return best is None or self.rising(value) > self.rising(best)


_OVERLAP_LOSSES = ("dice", "dice_ce", "dice_focal", "generalised_dice", "tversky", "bce_dice", "cross_entropy")

TASKS = {
    "segmentation": Task("dice", "dice", False, 1, frozenset(_OVERLAP_LOSSES)),
    "dose": Task("dose_score", "dose score", True, 2, frozenset({"masked_mae", "masked_mse"})),
}
"""segmentation: the label is a class index, the network answers a channel a class. dose: CT and dose are kept together, the label
is a bit a structure; the network sees CT and a channel a structure, and answers the dose (Gy over `data.dose_scale`)."""

MOST_STRUCTURES = 14
"""With the possible dose mask they are the bits of 16 less the sign."""

OPENKBP_STRUCTURES = (
    *("Brainstem", "SpinalCord", "RightParotid", "LeftParotid", "Esophagus", "Larynx", "Mandible"),
    *("PTV56", "PTV63", "PTV70"),
)
"""In the usual order of their channels."""
OPENKBP_LEFT_RIGHT = 1
"""The axis of OpenKBP's files along which left and right lie."""


def is_target(structure: str) -> bool:
    """Whether a structure is one that is to be irradiated, and not an organ at risk."""
    return structure.startswith("PTV")

"""Owns how predictions are judged: scores of a case, their summary over cases, and what an empty structure counts."""

from fasttrain.scoring.case_score import CaseScore, ClassScore, count_case, score_case, score_counts
from fasttrain.scoring.dose import DoseScore, DoseSummary, score_dose, summarise_doses
from fasttrain.scoring.slices import count_slices, with_slices
from fasttrain.scoring.summary import ScoreSummary, summarise

__all__ = [
    "CaseScore",
    "ClassScore",
    "DoseScore",
    "DoseSummary",
    "ScoreSummary",
    "count_case",
    "count_slices",
    "score_case",
    "score_counts",
    "score_dose",
    "summarise",
    "summarise_doses",
    "with_slices",
]

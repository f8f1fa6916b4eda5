"""Owns how predictions are judged: scores of a case, their summary over cases, and what an empty structure counts."""

from fasttrain.scoring.bootstrap import Interval, bootstrap_intervals
from fasttrain.scoring.case_score import CaseScore, ClassScore, count_case, score_case, score_counts
from fasttrain.scoring.dose import DoseScore, DoseSummary, score_dose, summarise_doses
from fasttrain.scoring.measures import ClassMeasure, measure_case
from fasttrain.scoring.slices import count_slices, with_slices
from fasttrain.scoring.summary import ScoreSummary, summarise

__all__ = [
    "CaseScore",
    "ClassMeasure",
    "ClassScore",
    "DoseScore",
    "DoseSummary",
    "Interval",
    "ScoreSummary",
    "bootstrap_intervals",
    "count_case",
    "count_slices",
    "measure_case",
    "score_case",
    "score_counts",
    "score_dose",
    "summarise",
    "summarise_doses",
    "with_slices",
]

"""Owns how predictions are judged: scores of a case, their summary over cases, and what an empty structure counts."""

from fasttrain.scoring.case_score import CaseScore, ClassScore, count_case, score_case, score_counts
from fasttrain.scoring.summary import ScoreSummary, summarise

__all__ = ["CaseScore", "ClassScore", "ScoreSummary", "count_case", "score_case", "score_counts", "summarise"]

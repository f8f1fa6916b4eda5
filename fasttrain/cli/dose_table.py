"""Owns how the scores of doses are printed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fasttrain.cli.figures import score_text
from fasttrain.cli.printing import print_table
from fasttrain.scoring import DoseScore, DoseSummary
from fasttrain.wording import counted


def print_doses(summary: DoseSummary, scores: Sequence[DoseScore], names: Sequence[str]) -> None:
    """A row a case: dose score, DVH score, and the mean DVH error of each structure, all in Gy."""
    rows = [("case", "dose", "DVH", *names)]
    for score in scores:
        means = {name: fmean(errors) for name, errors in score.errors.items()}
        shown = (score_text(means.get(name), 2) for name in names)
        rows.append((score.name, score_text(score.dose_score, 3), score_text(score.dvh_score, 3), *shown))
    pooled = (score_text(summary.dvh_by_structure[name], 2) for name in names)
    rows.append(("mean", score_text(summary.dose_score, 3), score_text(summary.dvh_score, 3), *pooled))
    rows.append(("counted", str(summary.cases), str(summary.cases), *(str(summary.counts[name]) for name in names)))
    print_table(rows)
    print(
        f"dose score {score_text(summary.dose_score, 3)} Gy, DVH score {score_text(summary.dvh_score, 3)} Gy over "
        f"{counted(summary.cases, 'case')} (lower is better)"
    )


def doses_document(summary: DoseSummary, scores: Sequence[DoseScore]) -> dict[str, Any]:
    """For JSON."""
    return {
        "dose_score_gy": summary.dose_score,
        "dvh_score_gy": summary.dvh_score,
        "dvh_gy_by_structure": summary.dvh_by_structure,
        "structure_counts": summary.counts,
        "cases": {
            score.name: {
                "dose_score_gy": score.dose_score,
                "dvh_score_gy": score.dvh_score,
                "metrics_gy": {
                    structure: {
                        metric: {"reference": expected, "prediction": found}
                        for metric, (expected, found) in pairs.items()
                    }
                    for structure, pairs in score.metrics.items()
                },
            }
            for score in scores
        },
    }

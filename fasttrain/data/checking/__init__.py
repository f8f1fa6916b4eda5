"""Owns the check of every case before anything is trained: facts of files, judgement against a recipe, and the report.

Needs neither torch nor MONAI, so that an unchanged set is checked in about a second.
"""

from fasttrain.data.checking.checking import Checked, check_cases, remaining_text, skipped_text, without_bad_cases
from fasttrain.data.checking.judging import CaseFindings, Terms

__all__ = ["CaseFindings", "Checked", "Terms", "check_cases", "remaining_text", "skipped_text", "without_bad_cases"]

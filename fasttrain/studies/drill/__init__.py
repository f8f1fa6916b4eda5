"""Owns the drill: a run that is killed and resumed on purpose, and compared with one that was not."""

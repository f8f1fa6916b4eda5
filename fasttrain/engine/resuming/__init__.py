"""Owns how a run goes on: what may differ from how it began, how its progress fits that, and what is told of it."""

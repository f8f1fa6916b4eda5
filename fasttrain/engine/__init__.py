"""The engine: a plan from recipe and machine, the parts put together, one loop over steps, and the course of a run."""

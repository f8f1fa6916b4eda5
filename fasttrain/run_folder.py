"""Owns the names of everything in a run folder, its claim by one process, and the way files get there whole."""

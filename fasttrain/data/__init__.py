"""Owns the way from files to preprocessed volumes, and from predictions back to files."""

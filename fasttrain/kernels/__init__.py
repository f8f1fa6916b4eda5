"""Owns the hand-written GPU kernels, each beside a plain torch form of the same computation that runs anywhere."""

"""Owns how weights move: optimisers, schedules, the moving average, and what scores make of the learning rate."""

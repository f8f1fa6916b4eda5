"""Owns the network's answers for whole volumes while it trains: predictions, their scores and their pictures."""

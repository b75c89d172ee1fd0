"""Sampling for a trainer in the same process: weight updates and log-probabilities."""

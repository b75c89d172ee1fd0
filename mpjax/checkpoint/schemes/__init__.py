"""Checkpoint formats: a file for each, a line for each in the registry."""

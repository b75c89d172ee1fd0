"""Schemes of quantised checkpoints: a file for each format, and a line for it in the registry."""

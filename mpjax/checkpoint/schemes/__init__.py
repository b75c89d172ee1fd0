"""Schemes of quantised checkpoints: a file for each format, registered in the registry."""

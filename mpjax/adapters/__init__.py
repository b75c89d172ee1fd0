"""Adapters of a language model, which requests choose by their names."""

"""Attention over the paged cache, and over prompts that are not in a cache."""

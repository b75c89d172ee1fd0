"""Attention over the paged cache, and over prompts without a cache."""

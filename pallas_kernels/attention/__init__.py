"""Attention: over the paged cache, and over a prompt that is not cached yet."""

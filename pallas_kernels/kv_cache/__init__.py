"""The paged, low-bit KV cache."""

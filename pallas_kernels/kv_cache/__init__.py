"""The paged, low-bit cache of keys and values."""

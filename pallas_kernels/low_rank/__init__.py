"""Changes of products by low-rank adapters, one of which each row selects."""

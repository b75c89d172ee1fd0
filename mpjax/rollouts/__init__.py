"""What a trainer in the same process asks of a sampler: new weights, and the same numbers."""

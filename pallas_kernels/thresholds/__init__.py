"""Thresholds of top-k and top-p: where the cumulative weight of a row's largest values suffices."""

"""Thresholds of top-k and top-p: where the weights of a row's largest numbers reach a sum."""

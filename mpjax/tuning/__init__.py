"""Measures plans of the kernels on a GPU, and writes the fastest to a table."""

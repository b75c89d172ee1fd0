"""Measurements on a GPU: every figure in the docs comes from a file that one of these wrote."""

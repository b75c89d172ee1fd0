"""Sums over the devices of a mesh."""

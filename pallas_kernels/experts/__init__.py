"""Grouped products with the experts of a mixture, and the routing of tokens to experts."""

"""The product by Hopper's warpgroups, in Mosaic GPU: weights are decoded during products."""

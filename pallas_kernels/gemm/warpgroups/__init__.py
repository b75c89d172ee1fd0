"""The product by warpgroups, in Mosaic GPU: Hopper's tensor cores don't wait for codes."""

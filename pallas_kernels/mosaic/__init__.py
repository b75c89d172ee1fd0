"""Building blocks for Mosaic GPU kernels, which program Hopper's warpgroups.

Mosaic GPU gives control that Triton does not: each warpgroup has its own task, copies and barriers
are explicit, and `wgmma` takes an operand from registers and runs asynchronously, while the
warpgroup decodes the next operand. The modules of this package are slow to import; the package
itself is not, and imports none of them.
"""

WARPGROUP_OUTPUTS = 64  # output channels of a warpgroup's tile: the M of `wgmma`

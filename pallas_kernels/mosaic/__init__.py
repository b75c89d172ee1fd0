"""All that is known of Pallas' Mosaic GPU, which Hopper's warpgroups are programmed with.

It has what Triton hides: warpgroups with tasks of their own, copies that they wait for, and `wgmma`
whose operand is in registers and which runs on while the next one is made. The modules here take a
while to import; this package itself does not.
"""

WARPGROUP_OUTPUTS = 64  # output channels of a warpgroup: the tall side of `wgmma`

"""The products of a layer after attention as one persistent kernel, for one row: an experiment.

    stream = residual + x · output
    inner = silu(gate) · up, of [gate, up] = norm(stream) · gate_up
    out = inner · down

All programs run at the same time, one on each multiprocessor. Each computes whole output channels
of every product: 32 of `output`, 96 each of gate and up, and 32 of `down`. Between products,
programs count in global memory that their channels are written, and wait until all have.

A producer warpgroup streams the words of all three products through one ring of slots in shared
memory. Words depend on no other program, so that it does not stop between products: while the
consumers wait, the next words arrive.

Consumers take slots in turn. A warp multiplies 16 output channels at a time by `mma.sync` of 8-bit
integers, so that codes are operands after a shift and a mask. x is rounded to fixed point for that:
15 bits for each group of input channels, and their sign, as two digits of 7 bits. The sums of `mma`
are 16 × 8, for 8 rows of x. There is one, so that columns say something else:

- A row of words has 128 bytes. So that a warp's loads touch all banks, odd output channels read the
  half of their row that even ones don't, and odd columns have x of that half.
- Columns 0, 1, 4 and 5 have the first digit of x, the others the second one.
- Columns 0 to 3 have x of a block's first group, and zeros in place of the other's; columns 4 to 7
  are the other way round.

Sums are exact integers. A product with ones gives the sum of x, which is multiplied with the zero
point.

Waits are bounded: after so many polls, a warp goes on, and the kernel says so in its output.

| file | content |
| --- | --- |
| `layout.py` | sizes, and how programs divide the products |
| `kernel.py` | the launch, the producer and the consumers |
| `barriers.py`, `products.py`, `exchange.py`, `fixed_point.py` | the PTX that they run |
| `assembly.py` | how PTX gets its operands |
"""

from benchmarks.persistent_kernel.kernel import Results, layer
from benchmarks.persistent_kernel.layout import COUNTERS, IN_FLIGHT, MARKS, PARTS, SLOTS

__all__ = ["COUNTERS", "IN_FLIGHT", "MARKS", "PARTS", "SLOTS", "Results", "layer"]

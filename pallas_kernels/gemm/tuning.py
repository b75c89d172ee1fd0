"""Which configuration a GEMM runs with."""

from __future__ import annotations

from pallas_kernels import backend
from pallas_kernels.formats import QuantizedTensor
from pallas_kernels.gemm.triton import GemmConfig

# Above this many rows it is faster to write the weight out in 16 bits and call cuBLAS: measured
# on the H200 at K4096 N24576, where the two cross between 256 and 1024 rows.
FUSED_ROWS = 256


def configure(rows: int, weight: QuantizedTensor) -> GemmConfig:
    """A sound configuration for x of `rows` rows, from the shapes and the size of the GPU."""
    outputs, blocks = weight.shape[1], weight.words.shape[0]
    multiprocessors = backend.multiprocessors()
    if rows <= 16:
        tile_m, tile_n, warps = 16, 64, 2
    elif rows <= 32:
        tile_m, tile_n, warps = 32, 64, 4
    elif rows <= 128 or -(-rows // 128) * -(-outputs // 128) < multiprocessors:
        tile_m, tile_n, warps = 64, 64, 4
    else:
        # Square tiles read each operand least often, but need as many tiles as multiprocessors.
        tile_m, tile_n, warps = 128, 128, 8
    tiles = -(-rows // tile_m) * -(-outputs // tile_n)
    # Enough warps to keep every multiprocessor's memory pipeline full. Each split adds a partial
    # sum to write and read back and pays for a pipeline of its own, so it gets four blocks or more.
    wanted = multiprocessors * 10 // warps
    splits = max(1, min(round(wanted / tiles), blocks // 4, 8))
    return GemmConfig(tile_m, tile_n, splits, warps, stages=3)

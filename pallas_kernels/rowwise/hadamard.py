"""The Hadamard transform of blocks of channels: in plain jnp, and of a row inside a kernel.

A block of 2ⁿ neighbouring channels is multiplied by Sylvester's matrix H / √2ⁿ, which is symmetric
and its own inverse: H[i, j] is −1 to the number of ones that i and j have in common. So outliers of
a few channels are spread over their block (Ashkboos et al., "QuaRot", 2024, §4.2).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.invariance import in_row_tiles
from mpjax.kernels.target import current_target

LEAST = 16  # channels of a block: the least side of a tensor-core tile
LARGEST = 4096
SIDE = 128  # of the largest matrix that a kernel multiplies with


def expected_block(block: int, channels: int) -> str | None:
    """The expected block size as text, or None if `block` is a valid size for this row."""
    if block & (block - 1) or not LEAST <= block <= LARGEST:
        return f"expected a power of two from {LEAST} to {LARGEST}"
    return f"expected a divisor of {channels}, the channels" if channels % block else None


def transformed(x: jax.Array, block: int) -> jax.Array:
    """The transform of each block of x [..., K], in float32; `block` divides K."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block)
    turn = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    turned = in_row_tiles(turn, wide, _matrix(block))
    return turned.reshape(x.shape)


def _matrix(size: int) -> jax.Array:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return jnp.asarray(matrix / np.float32(np.sqrt(size)))


def tile_size(channels: int, block: int) -> int:
    """The number of elements of a kernel's tile for a row, a power of two.

    channels: of the row, a power of two.
    """
    return max(channels, LEAST * max(_sides(block)))


def why_no_room(channels: int, block: int, capability: float) -> str | None:
    """The reason why a kernel can't transform a row of `channels` channels, or None if it can.

    Between its two products, the row goes through shared memory.
    """
    needed = 4 * tile_size(pl.next_power_of_2(channels), block)
    if needed <= (room := device.shared_memory(capability)):
        return None
    return (
        f"Hadamard's transform of {channels} channels takes {needed} bytes of shared memory, and "
        f"this GPU has {room}"
    )


def transform_tile(wide: jax.Array, block: int) -> jax.Array:
    """The transform of a row inside a kernel: float32 [size], of whole blocks.

    The matrix of a large block is the Kronecker product of two small matrices, which multiply the
    block's channels as a matrix: first along its rows, then along its columns.
    """
    rows, columns = _sides(block)
    found = _multiplied(wide.reshape(-1, columns))
    if rows > 1:
        found = found.reshape(-1, rows, columns).transpose(0, 2, 1).reshape(-1, rows)
        found = _multiplied(found).reshape(-1, columns, rows).transpose(0, 2, 1)
    return found.reshape(wide.shape) * jnp.float32(block**-0.5)


def _sides(block: int) -> tuple[int, int]:
    """The rows and columns of a block's channels as a matrix, each a power of two."""
    if block <= SIDE:
        return 1, block
    bits = block.bit_length() - 1
    return 1 << bits // 2, 1 << (bits - bits // 2)


def _multiplied(wide: jax.Array) -> jax.Array:
    """The product of float32 rows [n, size] and Sylvester's matrix [size, size], unscaled.

    Each row is split into two bfloat16 rows whose sum has 16 bits, for the tensor cores.
    """
    target, size = current_target(), wide.shape[1]
    index = jnp.arange(size)
    common = index[:, None] & index[None, :]
    for shift in (4, 2, 1):  # the parity of up to eight bits
        common ^= common >> shift
    signs = (1 - 2 * (common & 1)).astype(jnp.bfloat16)
    high = target.round_to(wide, jnp.bfloat16)
    low = target.round_to(wide - high, jnp.bfloat16)
    return target.dot(high.astype(jnp.bfloat16), signs) + target.dot(
        low.astype(jnp.bfloat16), signs
    )

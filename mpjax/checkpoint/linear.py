"""What AWQ and GPTQ modules decode to, and the unpacking and checks that both share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import CheckpointError
from mpjax.kernels.checks import is_known

WORD_BITS = 32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "zeros", "permutation"),
    meta_fields=("bits", "group_size"),
)
@dataclasses.dataclass(frozen=True)
class UniformLinear:
    """A uniformly quantised weight of K input and N output channels, unpacked; a pytree.

    Row i stands for input channel permutation[i], or i without a permutation, and belongs to group
    i // group_size; its weights are (codes[i] − zeros[group]) · scales[group].

    codes: uint8 [K, N], 0 to 2**bits − 1.
    scales: float16, bfloat16 or float32 as in the file, [G, N], where G = K / group_size.
    zeros: uint16 [G, N], integer zero points.
    permutation: int32 [K], or None for the channels' own order.
    bits: bits per code.
    group_size: input channels per group; None means one group of all K.
    """

    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array
    permutation: jax.Array | None
    bits: int
    group_size: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N): input channels, output channels."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> jax.Array:
        """Computes the weight float32 [K, N], rows in the order of the input channels.

        Exact for float16 and bfloat16 scales: 9 bits of code times 11 of scale fit in 24.
        """
        rows, columns = self.shape
        codes = self.codes.reshape(self.scales.shape[0], -1, columns).astype(jnp.int32)
        differences = codes - self.zeros[:, None, :].astype(jnp.int32)  # [G, group_size, N]
        weight = differences.astype(jnp.float32) * self.scales[:, None, :].astype(jnp.float32)
        weight = weight.reshape(rows, columns)
        if self.permutation is None:
            return weight
        return jnp.zeros_like(weight).at[self.permutation].set(weight, unique_indices=True)


def unpack_words(
    words: jax.Array, bits: int, axis: int, order: tuple[int, ...] | None = None
) -> jax.Array:
    """Splits 32-bit words into their fields along a matrix's axis.

    words: int32 or uint32 [R, C]. bits: a divisor of 32, at most 8. order: the field, counted from
    the lowest bits, that each element of a word comes from; lowest first by default.
    Returns uint8 [R · 32 / bits, C] for axis 0 and [R, C · 32 / bits] for axis 1.
    """
    rows, columns = words.shape
    fields = np.arange(WORD_BITS // bits) if order is None else np.array(order)
    shifts = jnp.asarray(fields * bits, jnp.uint32)
    mask = jnp.uint32((1 << bits) - 1)
    # Unsigned, because shifting a negative word right would bring ones in.
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)
    if axis == 0:
        codes = (unsigned[:, None, :] >> shifts[None, :, None]) & mask
        return codes.astype(jnp.uint8).reshape(-1, columns)
    codes = (unsigned[:, :, None] >> shifts[None, None, :]) & mask
    return codes.astype(jnp.uint8).reshape(rows, -1)


def check_middle(name: str, zeros: jax.Array, bits: int, said: str) -> None:
    """Raises CheckpointError unless all zero points are in the middle; of traced ones, nothing.

    zeros: integers [groups, N]. said: what config.json says, such as `sym: true`.
    """
    middle = 2 ** (bits - 1)
    if not is_known(zeros) or bool(jnp.all(zeros == middle)):
        return
    raise CheckpointError(
        f"{name}.qzeros has zero points from {int(zeros.min())} to {int(zeros.max())}, but by "
        f"config.json ({said}) all are {middle}: config.json is of another checkpoint"
    )


def check_scales(name: str, scales: jax.Array) -> None:
    """Raises CheckpointError when a module's scales have a NaN or an infinity.

    name: the module. scales: any float dtype and shape; counted on its device, and waited for.
    """
    count = int(_count_non_finite(scales))
    if count:
        raise CheckpointError(
            f"{name}: {count} of the {scales.size} scales are NaN or infinite; "
            "the checkpoint is damaged, or its quantisation overflowed"
        )


@jax.jit
def _count_non_finite(scales: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(scales), dtype=jnp.int32)

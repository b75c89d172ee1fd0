"""The format, the unpacking and the checks that AWQ and GPTQ modules share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.kernels.checks import is_known
from mpjax.kernels.formats import GROUP_SIZES

WORD_BITS = 32


def uniform_format(name: str, bits: int, group_size: int | None, channels: int) -> WeightFormat:
    """The format of integer codes with a scale and a zero point for each group.

    name: the module, for messages. group_size: input channels per group of `channels`; None is all.
    Raises CheckpointError for a group size that no format has.
    """
    if group_size not in GROUP_SIZES and group_size == channels:
        group_size = None  # one group, spelt as a number
    if group_size not in (*GROUP_SIZES, None):
        raise CheckpointError(
            f"{name} has groups of {group_size} input channels: supported are groups of 32, 64, "
            f"128 and of all {channels} (group_size -1)"
        )
    return WeightFormat(f"uint{bits}", group_size)


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

"""Packing of codes in 32-bit words, shared by AWQ, GPTQ and compressed-tensors.

AWQ and GPTQ both name their tensors `qweight`, `qzeros` and `scales`. They pack `qweight` along
different axes, so shapes distinguish them.
"""

from __future__ import annotations

from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.schemes.checks import describe
from mpjax.checkpoint.schemes.tensors import Specs
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.kernels.checks import is_known
from mpjax.kernels.codes.base import GROUP_SIZES

WORD_BITS = 32


def packing(specs: Specs) -> Literal["awq", "gptq", "gemv"] | None:
    """The packing of a module, by shapes alone; None for neither method.

    specs: the module's tensors by suffix. With N output channels, AWQ's 4-bit `qweight` has N / 8
    columns and GPTQ's has N. In AWQ's layout `gemv`, all tensors have N rows.
    """
    if "qweight" not in specs or "scales" not in specs:
        return None
    qweight, scales = specs["qweight"].shape, specs["scales"].shape
    if len(qweight) != 2 or len(scales) != 2:
        return None
    rows = [specs[suffix].shape[:1] for suffix in ("qzeros", "scales") if suffix in specs]
    if rows == [qweight[:1]] * 2 and qweight[0] > 1:
        return "gemv"
    if qweight[1] * 8 == scales[1]:
        return "awq"
    return "gptq" if qweight[1] == scales[1] else None


def check_packing(name: str, specs: Specs, method: str) -> None:
    """Raises CheckpointError unless a module's packing is that of config.json's method.

    name: the module. specs: its tensors by suffix. method: `awq` or `gptq`.
    """
    if packing(specs) != method:
        refuse_packing(name, specs, method)


def refuse_packing(name: str, specs: Specs, method: str | None) -> NoReturn:
    """Raises CheckpointError: the module's packing contradicts config.json's method.

    method: the `quant_method` of config.json, None without one.
    """
    for suffix in ("qweight", "scales"):
        if suffix not in specs:
            raise CheckpointError(
                f"{name} has no tensor {suffix}: found {', '.join(sorted(specs)) or 'none'}"
            )
    layout = f"qweight {describe(specs['qweight'])} beside scales {describe(specs['scales'])}"
    if (found := packing(specs)) is None:
        raise CheckpointError(
            f"{name}: {layout} is neither AWQ gemm (8 · columns of qweight = columns of scales) "
            "nor GPTQ (equal columns); other layouts can't be read"
        )
    given = f"says quant_method {method!r}" if method else "has no quantization_config"
    title, key, value = found.upper(), "quant_method", str(found)
    if method == "awq" and found != "gptq":  # layouts of one method
        given += " with another version"
    if found == "gemv" or method == found == "awq":
        value = "gemm" if found == "awq" else found
        title, key = f"AWQ {value}", "version"
    raise CheckpointError(
        f"{name}: config.json {given}, but the tensors are packed as {title} ({layout}); "
        f"put the quantization_config of the {title} checkpoint in config.json, with "
        f'"{key}": "{value}"'
    )


def uniform_format(name: str, bits: int, group_size: int | None, channels: int) -> WeightFormat:
    """The weight format of a module with a scale and a zero point for each group.

    name: of the module, for messages. group_size: input channels per group; None: all `channels`.
    Raises CheckpointError for an unsupported group size.
    """
    if group_size not in GROUP_SIZES and group_size == channels:
        group_size = None  # one group of all channels
    if group_size not in (*GROUP_SIZES, None):
        raise CheckpointError(
            f"{name} has groups of {group_size} input channels: supported are groups of 32, 64, "
            f"128 and of all {channels} (group_size -1)"
        )
    return WeightFormat(f"uint{bits}", group_size)


def usual_format(bits: int, group_size: int | None) -> WeightFormat:
    """The weight format of a checkpoint's modules before their channels are known.

    An unsupported group size stands for one group of all channels.
    """
    return WeightFormat(f"uint{bits}", group_size if group_size in GROUP_SIZES else None)


def unpack_words(
    words: jax.Array, bits: int, axis: int, order: tuple[int, ...] | None = None
) -> jax.Array:
    """Unpacks 32-bit words into their bit fields, along an axis of a matrix.

    words: int32 or uint32 [R, C]. bits: bits of a field, a divisor of 32, at most 8. order: for
    each element of a word, the index of its field, from the lowest bits; ascending by default.
    Returns uint8 [R · 32 / bits, C] for axis 0 and [R, C · 32 / bits] for axis 1.
    """
    rows, columns = words.shape
    fields = np.arange(WORD_BITS // bits) if order is None else np.array(order)
    shifts = jnp.asarray(fields * bits, jnp.uint32)
    mask = jnp.uint32((1 << bits) - 1)
    # Unsigned, because a right shift of a negative word would shift ones in.
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)
    if axis == 0:
        codes = (unsigned[:, None, :] >> shifts[None, :, None]) & mask
        return codes.astype(jnp.uint8).reshape(-1, columns)
    codes = (unsigned[:, :, None] >> shifts[None, None, :]) & mask
    return codes.astype(jnp.uint8).reshape(rows, -1)


def pack_words(
    fields: jax.Array, bits: int, axis: int, order: tuple[int, ...] | None = None
) -> jax.Array:
    """Packs unsigned fields into 32-bit words, along an axis: the inverse of `unpack_words`.

    fields: integers [R, C], each below 2**bits; the last word is padded with zeros.
    Returns int32 [⌈R · bits / 32⌉, C] for axis 0 and [R, ⌈C · bits / 32⌉] for axis 1.
    """
    count = WORD_BITS // bits
    places = np.arange(count) if order is None else np.array(order)
    shifts = jnp.asarray(places * bits, jnp.uint32)
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, -fields.shape[axis] % count)
    padded = jnp.pad(fields.astype(jnp.uint32), missing)
    if axis == 0:
        split = padded.reshape(-1, count, padded.shape[1]) << shifts[None, :, None]
    else:
        split = padded.reshape(padded.shape[0], -1, count) << shifts[None, None, :]
    words = jnp.sum(split, axis=axis + 1, dtype=jnp.uint32)  # the fields don't overlap
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def check_middle(name: str, zeros: jax.Array, bits: int, said: str) -> None:
    """Raises CheckpointError unless all zero points are 2**(bits − 1); traced zero points pass.

    zeros: integers [groups, N]. said: the setting of config.json, such as `sym: true`.
    """
    middle = 2 ** (bits - 1)
    if not is_known(zeros) or bool(jnp.all(zeros == middle)):
        return
    raise CheckpointError(
        f"{name}.qzeros has zero points from {int(zeros.min())} to {int(zeros.max())}, but by "
        f"config.json ({said}) all are {middle}: config.json is of another checkpoint"
    )

"""Decodes GPTQ checkpoints of 4 and 8 bits, `gptq` (v1) and `gptq_v2`, with or without act-order.

With K input and N output channels in G groups and b bits, a module has `qweight` int32
[K b / 32, N], `qzeros` int32 [G, N b / 32], `scales` [G, N] and `g_idx` int32 [K], the group of
each input channel; the weight is (code − zero) · scale. Source: GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py and gptqmodel/utils/model.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint import packed_module
from mpjax.checkpoint.gptq_config import GPTQConfig
from mpjax.checkpoint.linear import WORD_BITS, check_middle, uniform_format, unpack_words
from mpjax.checkpoint.packed_module import TensorSpec
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def matches(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a module's tensors, by suffix, are packed as GPTQ packs them."""
    return packed_module.packing(specs) == "gptq"


def check(
    specs: Mapping[str, TensorSpec],
    config: GPTQConfig,
    name: str,
    shape: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Checks a module's tensors by shape and dtype and returns its (K, N).

    specs: the tensors or their descriptions, by suffix. name: the module's path, which `dynamic`
    rules match. shape: the (K, N) that the model expects, if known. Raises CheckpointError.
    """
    packed_module.check_packing(name, specs, "gptq")
    config = _module_config(config, name)
    codes_per_word = WORD_BITS // config.bits
    rows = specs["qweight"].shape[0] * codes_per_word
    columns = specs["scales"].shape[1]
    if columns % codes_per_word:
        raise CheckpointError(
            f"{name} has {columns} output channels: expected a multiple of {codes_per_word}, so "
            f"that zero points of {config.bits} bits fill whole words"
        )
    said = f"bits {config.bits}"
    packed_module.check_weight_shape(name, (rows, columns), shape, config.group_size, said)
    groups = 1 if config.group_size is None else rows // config.group_size
    expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "qweight": ((rows // codes_per_word, columns), ("int32",)),
        "qzeros": ((groups, columns // codes_per_word), ("int32",)),
        "scales": ((groups, columns), packed_module.SCALE_DTYPES),
    }
    # Without act-order the groups are in order, and some writers leave g_idx out.
    if "g_idx" in specs or (config.desc_act and not config.static_groups):
        expected["g_idx"] = ((rows,), ("int32",))
    said += f" and group_size {config.group_size or -1}"
    packed_module.check_tensors(name, specs, expected, said)
    return rows, columns


def decode(
    tensors: Mapping[str, Any],
    config: GPTQConfig,
    name: str,
    shape: tuple[int, int] | None = None,
) -> PlainCodes:
    """Unpacks one module on the arrays' device; may be called inside `jax.jit`.

    tensors: the arrays as in the file, by suffix; `g_idx` must be concrete (a numpy array, not an
    argument of the jitted function), since the order of the channels is decided here.
    name: the module's path, which `dynamic` rules match. shape: the (K, N) that the model expects,
    if known. Raises CheckpointError as `check` and `permutation_of` do, and for zero points that
    contradict the config.
    """
    rows, _ = check(tensors, config, name, shape)
    config = _module_config(config, name)
    permutation = None
    if "g_idx" in tensors:
        if isinstance(tensors["g_idx"], jax.core.Tracer):
            raise ValueError(
                f"{name}.g_idx is an argument of a jitted function: decode needs its values, so "
                "pass it from outside as a numpy array"
            )
        order = permutation_of(np.asarray(tensors["g_idx"]), config.group_size or rows, name)
        permutation = None if order is None else jnp.asarray(order)
    codes, zeros = _unpack(
        jnp.asarray(tensors["qweight"]),
        jnp.asarray(tensors["qzeros"]),
        permutation,
        bits=config.bits,
        minus_one=config.checkpoint_format == "gptq",
    )
    if config.symmetric is not False:
        zeros = _centred(zeros, config)
    if config.symmetric:
        check_middle(name, zeros, config.bits, "sym: true")
    scales = jnp.asarray(tensors["scales"])
    format = uniform_format(name, config.bits, config.group_size, rows)
    return PlainCodes(format, codes, scales, zeros, permutation)


def permutation_of(g_idx: np.ndarray, group_size: int, name: str) -> np.ndarray | None:
    """The order of input channels in which groups lie side by side; None if they already do.

    g_idx: integers [K], the group of each channel. Returns int32 [K], channels of one group in
    their own order. Raises CheckpointError unless every group has exactly group_size channels.
    """
    channels = g_idx.shape[0]
    ordered = np.arange(channels) // group_size
    if np.array_equal(g_idx, ordered):
        return None
    if not np.array_equal(np.sort(g_idx), ordered):
        groups, counts = np.unique(g_idx, return_counts=True)
        wrong = (counts != group_size) | (groups < 0) | (groups >= channels // group_size)
        worst = int(np.argmax(wrong))
        raise CheckpointError(
            f"{name}.g_idx puts {counts[worst]} channels in group {groups[worst]}: expected "
            f"{group_size} channels in each of the groups 0 to {channels // group_size - 1}"
        )
    return np.argsort(g_idx, kind="stable").astype(np.int32)


def _centred(zeros: jax.Array, config: GPTQConfig) -> jax.Array:
    """Zero points of a symmetric weight as they are meant, whichever storage config.json names.

    Writers of v2 call it v1, and the reverse: then all of them are read one beside the middle.
    """
    middle = 2 ** (config.bits - 1)
    beside = middle + (1 if config.checkpoint_format == "gptq" else -1)
    return jnp.where(jnp.all(zeros == beside), jnp.uint16(middle), zeros)


def _module_config(config: GPTQConfig, name: str) -> GPTQConfig:
    """The config after `dynamic` rules, for a module whose tensors are quantised."""
    resolved = config.for_module(name)
    if resolved is None:
        raise CheckpointError(
            f"{name} has packed tensors, but a dynamic rule of config.json says that it was left "
            "in 16 bits; config.json is of another checkpoint"
        )
    return resolved


@functools.partial(jax.jit, static_argnames=("bits", "minus_one"))
def _unpack(
    qweight: jax.Array,
    qzeros: jax.Array,
    permutation: jax.Array | None,
    *,
    bits: int,
    minus_one: bool,
) -> tuple[jax.Array, jax.Array]:
    """Unpacks int32 [K b / 32, N] and [G, N b / 32] into uint8 [K, N] and uint16 [G, N]."""
    codes = unpack_words(qweight, bits, axis=0)
    if permutation is not None:
        codes = codes[permutation]
    words = jax.lax.bitcast_convert_type(qzeros, jnp.uint32)
    if minus_one:
        # The writer subtracted 1 from every field with one subtraction per word, so a zero point
        # of 0 borrowed from the next field; only adding word by word, mod 2**32, pays it back.
        ones = sum(1 << shift for shift in range(0, WORD_BITS, bits))
        words = words + jnp.uint32(ones)
    return codes, unpack_words(words, bits, axis=1).astype(jnp.uint16)

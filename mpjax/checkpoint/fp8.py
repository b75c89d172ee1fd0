"""Decodes FP8 (e4m3) checkpoints: the fine-grained format, and that of compressed-tensors.

With K input and N output channels, a module has `weight` float8_e4m3fn [N, K] and its scales: one
for each block of output and input channels, `weight_scale_inv` or `weight_scale`
[⌈N / block⌉, ⌈K / block⌉]; for each output channel, `weight_scale` [N, 1]; or one, [1]. The weight
is code · scale, in both ("inv" is the inverse of what the quantiser multiplied by). Source:
DeepSeek-V3 §3.3.2 and its README_WEIGHTS.md; compressed-tensors, compressors/quantized_compressors.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.checkpoint import packed_module
from mpjax.checkpoint.fp8_config import SCALE_NAMES, FP8Config
from mpjax.checkpoint.packed_module import TensorSpec
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes

SUFFIXES = ("weight", *SCALE_NAMES.values())
# Static scales of activations, which are rounded on the fly here, or not at all.
ACTIVATION_SUFFIXES = ("input_scale", "activation_scale")


def matches(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a module's tensors, by suffix, are FP8 ones."""
    if any(name in specs for name in SCALE_NAMES.values()):
        return True
    return "weight" in specs and str(specs["weight"].dtype).startswith("float8")


def check(
    specs: Mapping[str, TensorSpec],
    config: FP8Config,
    name: str,
    shape: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Checks a module's tensors by shape and dtype and returns its (K, N).

    specs: the tensors or their descriptions, by suffix. name: the module, for messages.
    shape: the (K, N) that the model expects, if known. Raises CheckpointError.
    """
    if "weight" not in specs or len(specs["weight"].shape) != 2:
        raise CheckpointError(f"{name} has no tensor weight that is a matrix: expected FP8 [N, K]")
    outputs, channels = specs["weight"].shape
    packed_module.check_weight_shape(name, (channels, outputs), shape, None)
    size = config.block[0]
    groups = config.format.groups(channels)  # as of the outputs, the last may be cut
    # One scale for all is written as a vector.
    grid = (1,) if size is None else (-(-outputs // size), groups)
    packed_module.check_tensors(
        name,
        specs,
        {
            "weight": ((outputs, channels), ("float8_e4m3fn",)),
            config.scale_name: (grid, packed_module.SCALE_DTYPES),
        },
        "quantization_config",
    )
    return channels, outputs


def decode(
    tensors: Mapping[str, Any],
    config: FP8Config,
    name: str,
    shape: tuple[int, int] | None = None,
) -> PlainCodes:
    """Codes float8_e4m3fn [K, N] with scales float32 [groups, N].

    tensors: the arrays as in the file, by suffix. name: the module, for messages.
    shape: the (K, N) that the model expects, if known. Raises CheckpointError as `check` does.
    May be called inside `jax.jit`.
    """
    channels, outputs = check(tensors, config, name, shape)
    scales = jnp.asarray(tensors[config.scale_name]).reshape(-1, config.format.groups(channels))
    size = min(config.block[0] or outputs, outputs)
    scales = _scales_of_channels(scales, size=size, outputs=outputs)
    return PlainCodes(config.format, jnp.asarray(tensors["weight"]).T, scales)


def check_codes(name: str, weight: jax.Array) -> None:
    """Raises CheckpointError when an FP8 weight has a NaN, which decoders take for a number."""
    if bool(_any_nan(weight)):
        raise CheckpointError(f"{name}.weight has weights that are NaN: the checkpoint is damaged")


@functools.partial(jax.jit, static_argnames=("size", "outputs"))
def _scales_of_channels(scales: jax.Array, *, size: int, outputs: int) -> jax.Array:
    """Float32 [groups, N] from [blocks of `size` output channels, groups]; the last may be cut."""
    return jnp.repeat(scales.astype(jnp.float32), size, axis=0)[:outputs].T


@jax.jit
def _any_nan(weight: jax.Array) -> jax.Array:
    return jnp.any(jnp.isnan(weight))

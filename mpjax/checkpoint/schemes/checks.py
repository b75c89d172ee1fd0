"""Checks of tensors and of config.json values, shared by the schemes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes.tensors import Specs, TensorSpec
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.kernels.checks import is_known

SCALE_DTYPES = ("float16", "bfloat16", "float32")
# Suffix → expected shape, allowed dtypes.
Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


def method_of(config: Mapping[str, Any]) -> Any:
    """The method of a `quantization_config`, from `quant_method` or `method`."""
    return config.get("quant_method", config.get("method"))


def describe(spec: TensorSpec) -> str:
    """The dtype and shape of a tensor for messages, such as `int32 [512, 4096]`."""
    return f"{spec.dtype} {list(spec.shape)}"


def require_groups(name: str, channels: int, format: WeightFormat) -> None:
    """Raises CheckpointError unless the groups of a format divide a module's input channels."""
    if not format.can_split(channels):
        raise CheckpointError(
            f"{name} has {channels} input channels, which groups of {format.group_size} don't "
            "divide: choose another group size or format in precision, such as W4g32 or W4gK, or "
            "for a table H8 or H4gK"
        )


def check_tensors(
    name: str,
    specs: Specs,
    expected: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]],
    said: str = "",
) -> None:
    """Raises CheckpointError for a missing tensor, or a wrong shape or dtype.

    said: for messages, the setting of config.json that determines the shapes, such as `group_size
    128`.
    """
    reason = f", by {said} in config.json" if said else ""
    for suffix, (shape, dtypes) in expected.items():
        if suffix not in specs:
            raise CheckpointError(
                f"{name} has no tensor {suffix}: expected {' or '.join(dtypes)} {list(shape)}"
                f"{reason}"
            )
        spec = specs[suffix]
        if tuple(spec.shape) != shape or str(spec.dtype) not in dtypes:
            raise CheckpointError(
                f"{name}.{suffix} is {describe(spec)}: expected {' or '.join(dtypes)} {list(shape)}"
                f"{reason}"
            )


def check_weight_shape(
    name: str,
    found: tuple[int, int],
    expected: tuple[int, int] | None,
    group_size: int | None,
    said: str = "",
) -> None:
    """Raises CheckpointError for a wrong (K, N), or if groups don't divide K.

    found: the (K, N) of the module's tensors. expected: the (K, N) of the model, None if unknown.
    said: for messages, the setting of config.json that determines `found`, such as `bits 8`.
    """
    if expected is not None and found != tuple(expected):
        reason = f", by {said} in config.json" if said else ""
        raise CheckpointError(
            f"{name} holds a weight of {found[0]} input and {found[1]} output channels{reason}: "
            f"the model expects {expected[0]} and {expected[1]}"
        )
    if group_size is not None and found[0] % group_size:
        raise CheckpointError(
            f"{name} has {found[0]} input channels: "
            f"expected a multiple of the config's group_size {group_size}"
        )


def check_scales(name: str, scales: jax.Array, noun: str = "scales") -> None:
    """Raises CheckpointError for scales with a NaN or an infinity; traced scales pass.

    name: of the module. scales: any float dtype and shape. noun: for the message. Blocks until the
    device has counted them.
    """
    if is_known(scales) and (count := int(_count_non_finite(scales))):
        raise CheckpointError(
            f"{name}: {count} of the {scales.size} {noun} are NaN or infinite; "
            "the checkpoint is damaged, or its quantisation overflowed"
        )


def parse_integer(config: Mapping[str, Any], keys: tuple[str, ...], source: str) -> int:
    """The integer under the first of `keys` in a quantization_config.

    source: the file and object, for messages. Raises CheckpointError if all keys are missing, or
    the value is not an integer.
    """
    for key in keys:
        if key in config:
            if type(config[key]) is not int:
                raise CheckpointError(
                    f"{source}: {key} is {config[key]!r:.80}: expected an integer"
                )
            return config[key]
    raise CheckpointError(f"{source} has no {keys[0]}: expected an integer")


def parse_switch(config: Mapping[str, Any], key: str, source: str) -> bool | None:
    """The boolean config[key]; None if missing. Raises CheckpointError for other types."""
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{source}: {key} is {value!r:.80}: expected true or false")
    return value


def parse_group_size(config: Mapping[str, Any], keys: tuple[str, ...], source: str) -> int | None:
    """Input channels per group; None for −1, which means one group of all channels.

    Raises CheckpointError for a missing key and for other values.
    """
    group_size = parse_integer(config, keys, source)
    if group_size != -1 and group_size < 1:
        raise CheckpointError(
            f"{source}: {keys[0]} is {group_size}: expected a positive number, or -1 for one group"
        )
    return None if group_size == -1 else group_size


def parse_pattern(expression: str, source: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises CheckpointError if it is invalid."""
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{source} is not a regular expression: {error}") from error


def require_choice(
    config: Mapping[str, Any],
    key: str,
    supported: tuple[Any, ...],
    source: str,
    default: Any = None,
) -> None:
    """Raises CheckpointError unless config[key] is one of `supported`.

    default: the value that a missing key stands for.
    """
    value = config.get(key)
    value = default if value is None else value
    if value not in supported:
        expected = " or ".join(repr(choice) for choice in supported)
        raise CheckpointError(f"{source}: {key} is {value!r}: expected {expected}")


@jax.jit
def _count_non_finite(scales: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(scales), dtype=jnp.int32)

"""Writer and Writing: encode modules for an export; checks of what a layout can hold."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import is_known
from mpjax.precision import describe_weights

REMEDY = "export with format='plain', which dequantises every map to the dtype of the model"

Modules = Mapping[str, PlainCodes]  # by name in files; shapes suffice instead of arrays


class Writer(NamedTuple):
    """Encodes the modules of one export.

    config: (names of unquantised linear maps, including the head; strategy of the FP8 cache's
        scales, `tensor`, `attn_head` or None) → the `quantization_config`.
    encode: (plain codes, name) → the module's tensors by suffix: the inverse of `decode`; works
        inside `jax.jit`. Arrays that don't depend on the codes' values may be NumPy's. Raises
        ValueError if the layout can't hold a shape, or known values.
    caution: which reader can't load such an export; None if all can.
    """

    config: Callable[[Sequence[str], str | None], dict[str, Any]]
    encode: Callable[[PlainCodes, str], dict[str, Any]]
    caution: str | None = None


class Writing(NamedTuple):
    """How a scheme is exported.

    layouts: the names of its layouts in `mpjax.export`.
    begin: (layout, quantised modules by name, with shapes at least) → Writer. Raises ValueError,
        with a remedy, if the layout can't hold them.
    default_for: kinds of codes for which the first of `layouts` is the default, such as `uint4`, or
        `uint4:sym` if all are symmetric.
    joins_experts: whether files hold only experts, fused into one tensor.
    packs_heads: whether the head may be quantised.
    """

    layouts: tuple[str, ...]
    begin: Callable[[str, Modules], Writer]
    default_for: tuple[str, ...] = ()
    joins_experts: bool = False
    packs_heads: bool = False


class Integers(NamedTuple):
    """The integer format of a module; group_size None: one group of all channels."""

    bits: int
    group_size: int | None
    symmetric: bool


def require_codes(
    layout: str, modules: Modules, codes: tuple[str, ...], permuted: str | None = None
) -> None:
    """Raises ValueError unless all modules have one of the given kinds of codes.

    permuted: the remedy for act-order; None if the layout supports it.
    """
    for name, plain in modules.items():
        if plain.format.codes not in codes:
            kinds = " and ".join(codes)
            raise ValueError(
                f"format {layout!r} holds {kinds}, and {name} is {describe_weights(plain.format)} "
                f"({plain.format}): {REMEDY}"
            )
        if permuted and plain.permutation is not None:
            raise ValueError(
                f"format {layout!r} has no place for the order of the channels of {name} "
                f"(act-order): {permuted}"
            )


def only_format(layout: str, modules: Modules) -> WeightFormat:
    """The common format of all modules, ignoring symmetry. Raises ValueError if they differ."""
    found = {
        dataclasses.replace(plain.format, symmetric=False): name for name, plain in modules.items()
    }
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ValueError(
            f"format {layout!r} holds weights of one format, and {first} is "
            f"{describe_weights(one)}, {second} {describe_weights(other)}: {REMEDY}"
        )
    return next(iter(found))


def are_static(layout: str, modules: Modules) -> bool:
    """Whether the modules have static activation scales.

    Raises ValueError if only some have one.
    """
    found = {plain.activation_scale is not None: name for name, plain in modules.items()}
    if len(found) > 1:
        raise ValueError(
            f"format {layout!r} rounds the activations of all maps alike, and {found[True]} has a "
            f"static scale, {found[False]} none: {REMEDY}"
        )
    return True in found


def integers_of(modules: Modules) -> dict[str, Integers]:
    """The Integers of each module; symmetric if all with the same bits and groups are."""

    def kind(format: WeightFormat) -> tuple[int, int | None]:
        return format.bits, format.group_size

    formats = {name: plain.format for name, plain in modules.items()}
    skewed = {kind(format) for format in formats.values() if not format.symmetric}
    return {
        name: Integers(*kind(format), kind(format) not in skewed)
        for name, format in formats.items()
    }


def most_common(integers: Mapping[str, Integers]) -> Integers:
    """The most common Integers; the first in case of a tie."""
    return collections.Counter(integers.values()).most_common(1)[0][0]


def zero_points(plain: PlainCodes) -> jax.Array:
    """The zero points [groups, N] of integer codes; constant for symmetric ones."""
    if plain.zeros is not None:
        return plain.zeros
    return jnp.full(plain.scales.shape, 2 ** (plain.format.bits - 1), jnp.uint16)


def require_zeros(
    layout: str, name: str, zeros: jax.Array, least: int, most: int, remedy: str = REMEDY
) -> None:
    """Raises ValueError for zero points that a layout can't hold; traced ones pass."""
    if not is_known(zeros):
        return
    low, high = int(zeros.min()), int(zeros.max())
    if low < least or high > most:
        raise ValueError(
            f"format {layout!r} holds zero points from {least} to {most}, and {name} has them from "
            f"{low} to {high}: {remedy}"
        )


def in_channel_order(plain: PlainCodes) -> tuple[jax.Array, jax.Array]:
    """Codes [K, N] in the original order of input channels, and each channel's group, int32 [K]."""
    channels = plain.codes.shape[0]
    groups = jnp.arange(channels, dtype=jnp.int32) // (plain.format.group_size or channels)
    if plain.permutation is None:
        return plain.codes, groups
    order = jnp.argsort(plain.permutation)
    return plain.codes[order], groups[order]


def require_columns(layout: str, name: str, outputs: int, multiple: int) -> None:
    """Raises ValueError if a module's output channels don't fill whole words."""
    if outputs % multiple:
        raise ValueError(
            f"format {layout!r} packs {multiple} output channels in a word, and {name} has "
            f"{outputs}: {REMEDY}"
        )

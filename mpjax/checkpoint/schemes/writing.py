"""Writing: how the modules of an export are encoded, and checks of which weights a layout holds."""

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

Modules = Mapping[str, PlainCodes]  # by their names in files; of the arrays, shapes are enough


class Writer(NamedTuple):
    """Writes the modules of one export.

    config: the `quantization_config`, which the format's reader reads, from the names of the linear
        maps that are not quantised, the head among them, and from the strategy of an FP8 cache's
        scales, `tensor` or `attn_head`, which is None if no scales lie beside the weights.
    encode: a module's tensors by suffix, from its plain codes and its name: undoes `decode`, also
        inside `jax.jit`. Arrays are JAX's, or NumPy's where their values don't depend on those of
        the codes. Raises ValueError where the layout can't hold a shape, or known values.
    caution: which reader does not load such an export right; None if all do.
    """

    config: Callable[[Sequence[str], str | None], dict[str, Any]]
    encode: Callable[[PlainCodes, str], dict[str, Any]]
    caution: str | None = None


class Writing(NamedTuple):
    """How a format is written.

    layouts: names of the forms of the format that `mpjax.export` writes.
    begin: the writer of a layout for all quantised modules, by name, whose arrays may be shapes
        alone. Raises ValueError, with what to do, if the layout can't hold them.
    default_for: kinds of codes for which the first of `layouts` is the default, such as `uint4`, or
        `uint4:sym` for codes that are all symmetric.
    joins_experts: whether files hold maps of all experts in one tensor, and no other maps.
    packs_heads: whether a quantised head may be among the modules.
    """

    layouts: tuple[str, ...]
    begin: Callable[[str, Modules], Writer]
    default_for: tuple[str, ...] = ()
    joins_experts: bool = False
    packs_heads: bool = False


class Integers(NamedTuple):
    """How a module's integer codes are grouped; group_size None is one group of all channels."""

    bits: int
    group_size: int | None
    symmetric: bool


def require_codes(
    layout: str, modules: Modules, codes: tuple[str, ...], permuted: str | None = None
) -> None:
    """Raises ValueError unless all modules have one of the kinds of codes.

    permuted: what to do about channels in another order (act-order); None where a layout has them.
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
    """The one format of all modules, except for symmetry. Raises ValueError where they differ."""
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
    """Whether the activations of all modules have a scale that is written.

    Raises ValueError where those of some have one, and those of others have none.
    """
    found = {plain.activation_scale is not None: name for name, plain in modules.items()}
    if len(found) > 1:
        raise ValueError(
            f"format {layout!r} rounds the activations of all maps alike, and {found[True]} has a "
            f"static scale, {found[False]} none: {REMEDY}"
        )
    return True in found


def integers_of(modules: Modules) -> dict[str, Integers]:
    """How each module's codes are written; symmetric if all of the same bits and groups are."""

    def kind(format: WeightFormat) -> tuple[int, int | None]:
        return format.bits, format.group_size

    formats = {name: plain.format for name, plain in modules.items()}
    skewed = {kind(format) for format in formats.values() if not format.symmetric}
    return {
        name: Integers(*kind(format), kind(format) not in skewed)
        for name, format in formats.items()
    }


def most_common(integers: Mapping[str, Integers]) -> Integers:
    """The Integers that most modules have; the first of several that are equally common."""
    return collections.Counter(integers.values()).most_common(1)[0][0]


def zero_points(plain: PlainCodes) -> jax.Array:
    """The zero points [groups, N] of integer codes, also of symmetric ones."""
    if plain.zeros is not None:
        return plain.zeros
    return jnp.full(plain.scales.shape, 2 ** (plain.format.bits - 1), jnp.uint16)


def require_zeros(
    layout: str, name: str, zeros: jax.Array, least: int, most: int, remedy: str = REMEDY
) -> None:
    """Raises ValueError for zero points that a layout can't hold; of traced ones, nothing."""
    if not is_known(zeros):
        return
    low, high = int(zeros.min()), int(zeros.max())
    if low < least or high > most:
        raise ValueError(
            f"format {layout!r} holds zero points from {least} to {most}, and {name} has them from "
            f"{low} to {high}: {remedy}"
        )


def in_channel_order(plain: PlainCodes) -> tuple[jax.Array, jax.Array]:
    """Codes [K, N] in the order of the input channels, and int32 [K], the group of each."""
    channels = plain.codes.shape[0]
    groups = jnp.arange(channels, dtype=jnp.int32) // (plain.format.group_size or channels)
    if plain.permutation is None:
        return plain.codes, groups
    order = jnp.argsort(plain.permutation)
    return plain.codes[order], groups[order]


def require_columns(layout: str, name: str, outputs: int, multiple: int) -> None:
    """Raises ValueError where a module's output channels don't fill whole words."""
    if outputs % multiple:
        raise ValueError(
            f"format {layout!r} packs {multiple} output channels in a word, and {name} has "
            f"{outputs}: {REMEDY}"
        )

"""What a kind of codes contributes."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels.bits import multiply, pack_pair, unpack_pair
from mpjax.kernels.formats import WeightFormat

Decoder = Callable[[int], jax.Array]


class Parameters(NamedTuple):
    """What turns codes into numbers; of whole groups, or of any values that they broadcast with.

    scales: [groups, N]. zeros: [groups, N], or None. channel_scales: float32 [N], or None.
    table: float32 [2**bits], or None. Dtypes are those of PlainCodes.
    """

    scales: jax.Array
    zeros: jax.Array | None = None
    channel_scales: jax.Array | None = None
    table: jax.Array | None = None

    def of_groups(self) -> Parameters:
        """The same, such as they broadcast with values [groups, size, N]."""
        channel_scales = None if self.channel_scales is None else self.channel_scales[None, None]
        zeros = None if self.zeros is None else self.zeros[:, None]
        return Parameters(self.scales[:, None], zeros, channel_scales, self.table)


class Group(NamedTuple):
    """A group's parameters in a kernel, for `tile_n` output channels.

    scale: float32 [tile_n, 1], by which the sum over the group is multiplied, or None.
    arguments: [tile_n, 1] or [tile_n] each; what decoding needs. Where it needs nothing, a piece of
        the parameters all the same: the compiler loads ahead only what the tensor cores depend on.
    """

    scale: jax.Array | None
    arguments: tuple[jax.Array, ...] = ()


class CodeKind(abc.ABC):
    """The meaning of codes, outside and inside of kernels. Kinds hold no state."""

    code_dtype = jnp.dtype(jnp.uint8)
    scale_dtypes: tuple[str, ...] = ("float16", "bfloat16")
    has_zeros = False
    zero_point = 0  # what is stored of all groups where they have none of their own
    has_group_scales = True  # that multiply decoded values; else a group is part of decoding
    has_channel_scales = False
    has_table = False

    @abc.abstractmethod
    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """The parameters with which the codes reach all weights of each group.

        groups: float32 [groups, size, N]. table: of a kind with a table; None for its usual one.
        """

    @abc.abstractmethod
    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """The codes whose values are nearest to float32 values; parameters broadcast with them."""

    @abc.abstractmethod
    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """The float32 values of codes; parameters broadcast with them."""

    def pack(self, planes: jax.Array) -> jax.Array:
        """Words [..., columns, width] of codes uint8 [..., planes, width]; not of flat formats."""
        raise NotImplementedError(f"{type(self).__name__}: its codes are words already")

    def unpack(self, words: jax.Array) -> jax.Array:
        """The inverse of `pack`."""
        raise NotImplementedError(f"{type(self).__name__}: its words are codes already")

    def pack_parameters(self, scales: jax.Array, zeros: jax.Array) -> jax.Array:
        """Words uint32 [..., words, N] of scales and zeros uint16 [..., groups, N].

        There are groups for whole blocks.
        """
        if scales.dtype == jnp.float32:
            return jax.lax.bitcast_convert_type(scales, jnp.uint32)
        return pack_pair(scales, zeros)

    def unpack_parameters(self, words: jax.Array, scale_dtype: str) -> tuple[jax.Array, jax.Array]:
        """The inverse of `pack_parameters`; where there are no zeros, 0."""
        if scale_dtype == "float32":
            scales = jax.lax.bitcast_convert_type(words, jnp.float32)
            return scales, jnp.zeros_like(words, jnp.uint16)
        return unpack_pair(words, scale_dtype, jnp.uint16)

    @abc.abstractmethod
    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """In a kernel: what words of parameters uint32 [tile_n] say of a tile [tile_n, width]."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, apart from Triton's own, that `shared` takes."""
        return 0

    def shared(self, table: Any, operand: jnp.dtype, width: int) -> tuple[jax.Array, ...]:
        """In a kernel, before its loop: what all groups share, of a table.

        width: of tiles of words [tile_n, width].
        """
        return ()

    @abc.abstractmethod
    def decoder(
        self,
        columns: list[jax.Array],
        arguments: tuple[jax.Array, ...],
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """In a kernel: a function from a plane to its tile, before scaling, in dtype `operand`.

        columns: tiles of words [tile_n, width]. Where the target has inline PTX, the work is PTX,
        and elsewhere its twin in jnp.
        """

    def scaled_decoder(
        self,
        columns: list[jax.Array],
        group: Group,
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """`decoder` times the group's scale and 2**`scaled_exponent`, rounded to `operand`."""
        decode = self.decoder(columns, group.arguments, shared, operand)
        assert group.scale is not None
        scale = group.scale
        return lambda plane: multiply(decode(plane), scale)

    def scaled_exponent(self, operand: jnp.dtype) -> int:
        """Of two: what one is worth in `scaled_decoder`."""
        return 0


def divisible(scales: jax.Array) -> jax.Array:
    """Float32 scales, with 1 for those too small to divide by: of zeros, or nearly zeros."""
    return jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)

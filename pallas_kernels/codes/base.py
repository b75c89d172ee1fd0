"""The interface of a kind of codes: how they are fitted, chosen, packed, and decoded in kernels."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.bits import multiply, pack_pair, pack_planes, unpack_pair, unpack_planes
from mpjax.kernels.checks import is_known

if TYPE_CHECKING:
    from mpjax.kernels.formats import WeightFormat
    from mpjax.kernels.plain_codes import PlainCodes

Decoder = Callable[[int], jax.Array]  # from the index of a plane to its decoded tile


class Parameters(NamedTuple):
    """The parameters that map codes to weights.

    Shapes are given for a whole weight. `of_groups` expands them to broadcast with its groups, and
    `Grid.row` returns the parameters of one row.

    scales: [groups, N]. zeros: [groups, N], or None. channel_scales: float32 [N], or None.
    table: float32 [2**bits], or None. Dtypes are those of PlainCodes.
    """

    scales: jax.Array
    zeros: jax.Array | None = None
    channel_scales: jax.Array | None = None
    table: jax.Array | None = None

    def of_groups(self) -> Parameters:
        """These parameters with one more axis, to broadcast with values [groups, size, N]."""
        channel_scales = None if self.channel_scales is None else self.channel_scales[None, None]
        zeros = None if self.zeros is None else self.zeros[:, None]
        return Parameters(self.scales[:, None], zeros, channel_scales, self.table)


class Group(NamedTuple):
    """The parameters of a group in a kernel, for `tile_n` output channels.

    scale: float32 [tile_n, 1], the factor of the sum over the group; None if decoding applies it.
    arguments: of the decoder, each [tile_n, 1] or [tile_n]. Decoders that need no parameters take a
        part of them all the same, since the compiler pipelines only loads on which operands of the
        tensor cores depend.
    """

    scale: jax.Array | None
    arguments: tuple[jax.Array, ...] = ()


class Spelling(NamedTuple):
    """How a precision such as `W4A16` names a kind of codes: its W part, and its A part.

    usual_size: the group size that is omitted from names; None for all input channels.
    """

    weights: str
    activations: str
    usual_size: int | None


GROUP_SIZES = (32, 64, 128)  # of most kinds


class CodeKind(abc.ABC):
    """The meaning of codes, outside and inside of kernels. Kinds have no state.

    bits: of a code. group_sizes: the numbers of input channels that can share parameters; None for
        all. operands: the dtypes to which codes can be decoded for the tensor cores, the default
        first; None for the activations' 16-bit dtype. spellings: one for each operand.
    """

    bits: int
    group_sizes: tuple[int | None, ...] = GROUP_SIZES
    operands: tuple[str | None, ...] = (None,)
    spellings: tuple[Spelling, ...]
    may_cut_groups = False  # whether the last group may have fewer input channels
    groups_of_word = 1  # the number of neighbouring groups whose parameters share a 32-bit word
    code_dtype = jnp.dtype(jnp.uint8)
    scale_dtypes: tuple[str, ...] = ("float16", "bfloat16")
    has_zeros = False
    has_minima = False  # whether zeros are floats in the scales' dtype that decoding adds
    zero_point = 0  # the zero point that is stored for all groups if `has_zeros` is false
    has_group_scales = True  # whether scales multiply decoded values; else decoding applies them
    has_channel_scales = False
    has_table = False
    scales_of_word = 1  # of parameters: the number of groups with a scale of their own in a word
    # Why other scales can't replace those of a weight, for messages; None if they can.
    why_scales_are_fixed: str | None = None

    def require_values(self, plain: PlainCodes) -> None:
        """Raises ValueError for codes or parameters with values that are invalid for this kind.

        Under `jit`, values are not known and not checked.
        """
        if self.code_dtype == jnp.uint8:
            require_range("codes", plain.codes, 2**self.bits - 1)
        if plain.zeros is not None and not self.has_minima:
            require_range("zeros", plain.zeros, 2**self.bits)

    @abc.abstractmethod
    def fit(
        self, groups: jax.Array, format: WeightFormat, table: jax.Array | None = None
    ) -> Parameters:
        """Fits parameters, so that the range of codes spans all weights of each group.

        groups: float32 [groups, size, N]. table: of a kind with a table; None for its default.
        """

    @abc.abstractmethod
    def nearest(self, values: jax.Array, parameters: Parameters) -> jax.Array:
        """The codes whose values are nearest to float32 values; parameters broadcast with them."""

    @abc.abstractmethod
    def decode(self, codes: jax.Array, parameters: Parameters) -> jax.Array:
        """The float32 values of codes; parameters broadcast with them."""

    def pack(self, planes: jax.Array) -> jax.Array:
        """Packs codes uint8 [..., planes, width] to words [..., columns, width].

        By default one column of uint16, in which plane j has the bits from j · bits on. Kinds whose
        codes are words (flat formats) are not packed.
        """
        return pack_planes(planes, self.bits)[..., None, :]

    def unpack(self, words: jax.Array) -> jax.Array:
        """The inverse of `pack`."""
        return unpack_planes(words[..., 0, :], self.bits)

    def pack_parameters(self, scales: jax.Array, zeros: jax.Array) -> jax.Array:
        """Packs the parameters of groups to words uint32 [..., words, N].

        scales: [..., groups, N] in one of `scale_dtypes`. zeros: uint16 [..., groups, N]. The
        groups fill whole blocks.
        """
        if scales.dtype == jnp.float32:
            return jax.lax.bitcast_convert_type(scales, jnp.uint32)
        return pack_pair(scales, zeros)

    def unpack_parameters(self, words: jax.Array, scale_dtype: str) -> tuple[jax.Array, jax.Array]:
        """The inverse of `pack_parameters`: scales and zeros, which are 0 if there are none."""
        if scale_dtype == "float32":
            scales = jax.lax.bitcast_convert_type(words, jnp.float32)
            return scales, jnp.zeros_like(words, jnp.uint16)
        return unpack_pair(words, scale_dtype, jnp.uint16)

    def split_parameters(self, words: jax.Array) -> list[jax.Array]:
        """In a kernel, the argument of `load` for each group with its own scale in a word.

        words: uint32 [tile_n], words of parameters with `scales_of_word` such groups.
        """
        bits = 32 // self.scales_of_word
        return [words, *(words >> jnp.uint32(bits * i) for i in range(1, self.scales_of_word))]

    @abc.abstractmethod
    def load(
        self, parameters: jax.Array, scale_dtype: str, operand: jnp.dtype, width: int
    ) -> Group:
        """In a kernel, the parameters of a group for a tile of words [tile_n, width].

        parameters: uint32 [tile_n], whose lowest bits are the group's (`split_parameters`).
        operand: the dtype that codes are decoded to.
        """

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that the result of `shared` takes, beside Triton's own."""
        return 0

    def shared(self, table: Any, operand: jnp.dtype, width: int) -> tuple[jax.Array, ...]:
        """In a kernel, before its loop: the arguments of decoding that all groups share.

        table: a reference to float32 [2**bits], or None.
        width: of tiles of words [tile_n, width].

        Returns a prepared table, or () for kinds without tables.
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
        """In a kernel, a function that decodes a plane to a tile of dtype `operand`, unscaled.

        columns: the tiles of words, [tile_n, width] each, of one group.
        arguments: of the group (`Group.arguments`).
        shared: the result of `shared`.

        If the target has inline PTX, decoding is PTX, otherwise an equivalent in jnp.
        """

    def scaled_decoder(
        self,
        columns: list[jax.Array],
        group: Group,
        shared: tuple[jax.Array, ...],
        operand: jnp.dtype,
    ) -> Decoder:
        """A decoder that multiplies by the group's scale, and rounds once to `operand`.

        A decoded weight is scaled by 2**`scaled_exponent`.
        """
        decode = self.decoder(columns, group.arguments, shared, operand)
        assert group.scale is not None
        scale = group.scale
        return lambda plane: multiply(decode(plane), scale)

    def scaled_exponent(self, operand: jnp.dtype) -> int:
        """The exponent of the power of two by which weights that include their scales are decoded.

        `scaled_decoder` returns such weights, and so does `decoder` if `has_group_scales` is false.
        """
        return 0


def require_range(name: str, array: jax.Array, largest: int, least: int = 0) -> None:
    """Raises ValueError for known values outside of a range."""
    if not is_known(array):
        return
    # On a CPU, NumPy reads the array in place, much faster than by running two programs.
    is_on_host = isinstance(array, jax.Array) and array.platform() == "cpu"
    found = np.asarray(array) if is_on_host else array
    with jax.ensure_compile_time_eval():  # under `jit`, constant arrays are known
        low, high = int(found.min()), int(found.max())
    if low < least or high > largest:
        raise ValueError(f"{name} are {low} to {high}; expected {least} to {largest}")


def divisible(scales: jax.Array) -> jax.Array:
    """Float32 scales; 1 for groups of zeros, whose scales are too small to divide by."""
    return jnp.where(scales < jnp.finfo(jnp.float32).tiny, 1.0, scales)

"""Weight formats and the packed tensor that every one of them fills."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp

from pallas_kernels import bits as bit_planes

GROUP_SIZES = (32, 64, 128)
# Codes of one plane that lie side by side: 64 16-bit words are a full 128-byte cache line.
MAXIMUM_PLANE_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """How a weight matrix is stored; static, hashable, written as `uint4:g128` or `uint8:gK:sym`.

    codes: `uint4` or `uint8`, or `bfloat16` / `float16` for a plain array.
    group_size: input channels that share a scale and a zero point: 32, 64, 128, or None for all.
    symmetric: whether a quantiser fixes the zero point at 2**(bits − 1).
    """

    codes: str
    group_size: int | None = None
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.codes not in ("uint4", "uint8", "bfloat16", "float16"):
            raise ValueError(
                f"unknown weight format {self.codes!r}: expected uint4, uint8, bfloat16 or float16"
            )
        if not self.is_packed and (self.group_size is not None or self.symmetric):
            raise ValueError(f"{self.codes} is a plain array: no group size and no symmetry")
        if self.is_packed and self.group_size not in (*GROUP_SIZES, None):
            raise ValueError(
                f"{self.codes} with group size {self.group_size}: "
                f"expected one of {GROUP_SIZES}, or None for one group over all input channels"
            )

    @classmethod
    def parse(cls, text: str) -> WeightFormat:
        """Reads `codes[:gSIZE][:sym]`, where SIZE is a number or K, which a missing size means."""
        match = re.fullmatch(r"(\w+?)(?::g(\d+|K))?(:sym)?", text)
        if match is None:
            raise ValueError(
                f"can't read the weight format {text!r}: expected, for example, "
                "uint4:g128, uint8:gK:sym or bfloat16"
            )
        codes, size, symmetric = match.groups()
        if codes in ("bfloat16", "float16"):
            if size or symmetric:
                raise ValueError(f"{text!r}: {codes} takes no group size and no symmetry")
            return cls(codes)
        group_size = None if size in (None, "K") else int(size)
        return cls(codes, group_size, symmetric is not None)

    def __str__(self) -> str:
        if not self.is_packed:
            return self.codes
        group = "K" if self.group_size is None else self.group_size
        return f"{self.codes}:g{group}" + (":sym" if self.symmetric else "")

    @property
    def is_packed(self) -> bool:
        """Whether weights of this format are QuantizedTensors rather than plain arrays."""
        return self.codes.startswith("uint")

    @property
    def bits(self) -> int:
        """Bits per code."""
        return int(self.codes.removeprefix("uint")) if self.is_packed else 16

    @property
    def planes(self) -> int:
        """Codes in a 16-bit word."""
        return bit_planes.planes_per_word(self.bits)

    @property
    def plane_width(self) -> int:
        """Neighbouring input channels in one plane of a block; a plane never straddles groups."""
        return min(self.group_size or MAXIMUM_PLANE_WIDTH, MAXIMUM_PLANE_WIDTH)

    @property
    def block(self) -> int:
        """Input channels of one row of words: what a kernel's main loop takes at a time."""
        return self.planes * self.plane_width

    def groups(self, channels: int) -> int:
        """Number of groups over `channels` input channels."""
        return 1 if self.group_size is None else channels // self.group_size

    def nbytes(self, shape: tuple[int, int]) -> int:
        """Bytes that a weight of `shape` [input, output channels] takes in device memory."""
        channels, outputs = shape
        if not self.is_packed:
            return channels * outputs * 2
        blocks = -(-channels // self.block)
        groups = 1 if self.group_size is None else blocks * self.block // self.group_size
        return outputs * (blocks * self.plane_width * 2 + groups * 4)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "parameters", "permutation"],
    meta_fields=["format", "channels", "scale_dtype"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A packed weight matrix W [K, N] with W[k, n] = (code − zero) · scale of k's group.

    words: uint16 [K blocks, N, plane width]. Bits j·b … of word (i, n, w) are the code of input
        channel i·block + j·plane_width + w. A tile of neighbouring output channels is contiguous.
    parameters: uint32 [groups, N]: the scale's 16 bits below the integer zero point; one 32-bit
        word each, because narrower loads are not pipelined.
    permutation: int32 [K] or None; row i of the packed matrix belongs to input channel
        permutation[i] (GPTQ's act-order).
    channels: K before padding; the codes of padded channels meet zeros of the activations.
    scale_dtype: `float16` or `bfloat16`.
    """

    words: jax.Array
    parameters: jax.Array
    permutation: jax.Array | None
    format: WeightFormat
    channels: int
    scale_dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape [K, N]."""
        return self.channels, self.words.shape[1]

    @property
    def padded_channels(self) -> int:
        """K rounded up to whole blocks."""
        return self.words.shape[0] * self.format.block

    @property
    def nbytes(self) -> int:
        """Bytes in device memory."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def scales(self) -> jax.Array:
        """Scales [groups, N] in `scale_dtype`; padding groups included."""
        return bit_planes.unpack_pair(self.parameters, self.scale_dtype, jnp.uint16)[0]

    def zeros(self) -> jax.Array:
        """Integer zero points [groups, N] as uint16; padding groups included."""
        return bit_planes.unpack_pair(self.parameters, self.scale_dtype, jnp.uint16)[1]

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The matrix [K, N] in the order of the input channels, computed in float32."""
        codes, scales, zeros = unpack(self)
        groups = scales.shape[0]
        centred = codes.astype(jnp.float32).reshape(groups, -1, codes.shape[1])
        centred -= zeros.astype(jnp.float32)[:, None, :]
        values = (centred * scales.astype(jnp.float32)[:, None, :]).reshape(codes.shape)
        if self.permutation is not None:
            values = jnp.zeros_like(values).at[self.permutation].set(values)
        return values.astype(dtype)


@functools.partial(jax.jit, static_argnames="format")
def pack(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array,
    format: WeightFormat,
    permutation: jax.Array | None = None,
) -> QuantizedTensor:
    """Packs plain codes into the layout that the kernels read; `unpack` is its exact inverse.

    codes: unsigned integers [K, N], K a multiple of the group size.
    scales: float16 or bfloat16 [groups, N].
    zeros: integers [groups, N], from 0 to 2**bits.
    permutation: see QuantizedTensor.

    Raises ValueError where a shape or a dtype does not fit.
    """
    if not format.is_packed:
        raise ValueError(f"{format} is not packed: a plain array needs no packing")
    if codes.ndim != 2:
        raise ValueError(f"codes have shape {codes.shape}; expected a matrix [K, N]")
    if not jnp.issubdtype(codes.dtype, jnp.unsignedinteger):
        raise ValueError(f"codes have dtype {codes.dtype}; expected unsigned integers")
    channels, outputs = codes.shape
    if format.group_size is not None and channels % format.group_size:
        raise ValueError(
            f"{channels} input channels can't be split into groups of {format.group_size}; "
            "choose a group size that divides them, or gK for one group"
        )
    expected = (format.groups(channels), outputs)
    for name, array in (("scales", scales), ("zeros", zeros)):
        if array.shape != expected:
            raise ValueError(f"{name} have shape {array.shape}; {format} expects {expected}")
    if scales.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"scales have dtype {scales.dtype}; expected float16 or bfloat16")
    if permutation is not None and permutation.shape != (channels,):
        raise ValueError(f"permutation has shape {permutation.shape}; expected ({channels},)")

    padding = -channels % format.block
    codes = jnp.pad(codes.astype(jnp.uint8), ((0, padding), (0, 0)))
    group_padding = 0 if format.group_size is None else padding // format.group_size
    parameters = bit_planes.pack_pair(scales, zeros.astype(jnp.uint16))
    parameters = jnp.pad(parameters, ((0, group_padding), (0, 0)))

    planes = codes.reshape(-1, format.planes, format.plane_width, outputs)
    planes = planes.transpose(0, 3, 1, 2)  # [blocks, N, planes, plane width]
    words = bit_planes.pack_planes(planes, format.bits)
    return QuantizedTensor(
        words, parameters, permutation, format, channels, jnp.dtype(scales.dtype).name
    )


@jax.jit
def unpack(tensor: QuantizedTensor) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes uint8 [K, N], scales [groups, N] and zeros uint16 [groups, N], bit for bit as packed.

    Codes are in packed order: with act-order, row i belongs to input channel permutation[i].
    """
    planes = bit_planes.unpack_planes(tensor.words, tensor.format.bits)
    codes = planes.transpose(0, 2, 3, 1).reshape(tensor.padded_channels, -1)
    groups = tensor.format.groups(tensor.channels)
    return codes[: tensor.channels], tensor.scales()[:groups], tensor.zeros()[:groups]


def concatenate(tensors: list[QuantizedTensor]) -> QuantizedTensor | None:
    """One tensor with the output channels of all, or None where they don't share a layout.

    Layouts agree when format, input channels, scale dtype and permutation are equal; checking
    permutations reads them back from the device.
    """
    first = tensors[0]
    if len({(tensor.format, tensor.channels, tensor.scale_dtype) for tensor in tensors}) > 1:
        return None
    permutations = [t.permutation for t in tensors if t.permutation is not None]
    if permutations and len(permutations) < len(tensors):
        return None
    if not all(jnp.array_equal(permutations[0], other) for other in permutations[1:]):
        return None
    return dataclasses.replace(
        first,
        words=jnp.concatenate([tensor.words for tensor in tensors], axis=1),
        parameters=jnp.concatenate([tensor.parameters for tensor in tensors], axis=1),
    )

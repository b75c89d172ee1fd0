"""The packed weight tensor of all formats, and `pack` and `unpack`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.checks import (
    are_finite,
    as_array,
    as_dtype,
    is_known,
    require_type,
)
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.leading_axes import over_leading_axes
from mpjax.kernels.plain_checks import read_arrays, require_sound
from mpjax.kernels.plain_codes import PlainCodes
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.static_rows import StaticRows

ARRAYS = [
    "words",
    "parameters",
    "permutation",
    "channel_scales",
    "table",
    "activation_bits",
    "activation_scale",
]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=ARRAYS,
    meta_fields=["format", "scale_dtype", "padding"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class QuantizedTensor:
    """A packed weight W [..., K, N]; `mpjax.kernels.codes` defines the meaning of its codes.

    Leading axes (experts, layers) precede the shape of every array, even of a table: `jax.vmap` and
    `jax.lax.scan` process one matrix after another, and slices along leading axes are tensors.
    `partition_specs` divides a tensor among devices, along K and along N.

    words: [K blocks, N, columns · plane width], unsigned integers as wide as the operand to which
        they are decoded. Words at `lane` of block i have one code of each plane: code j is input
        channel i·block + j·plane_width + lane. A tile of neighbouring output channels is
        contiguous. In flat formats, whose words are codes, the plain matrix [1, N, padded K] in
        int8 or float8_e4m3fn.
    parameters: uint32 [groups, N], the parameters of a group in one 32-bit word, because narrower
        loads are not pipelined: the 16-bit scale below the zero point (0 if codes have none), or
        the bits of a float32 scale. `liquid4` has [groups / 2, N]: a byte of step and a byte of
        offset of one group, below those of the next group. `float4` has [groups / 4, N]: the bytes
        of four scales in e8m0, exponents of two plus 127, the first group's lowest.
    format: of the weight (static).
    scale_dtype: the dtype of the scales in `parameters`: `float16`, `bfloat16`, `float32`, or
        `uint16` for the steps of `liquid4` (static).
    padding: the number of input channels beyond K that pad the last block (static). Their codes are
        multiplied by zeros instead of activations.
    permutation: int32 [K] or None; row i of the packed matrix is input channel permutation[i]
        (GPTQ's act-order, or the order of an `int4` weight's blocks).
    channel_scales: float32 [N], the scales of `liquid4`'s output channels, else None.
    table: float32 [2**bits], the values of `table…` codes, else None.
    activation_bits: uint8 [ceil(K / 128)] of `int4`, the bits, 4 or 8, of the activations that each
        group of packed rows multiplies; None for 8 in all groups, and for other formats.
    activation_scale: float32 [1], the static scale of all activations; None for a scale per row.
    """

    words: jax.Array
    parameters: jax.Array
    format: WeightFormat
    scale_dtype: str
    padding: int = 0
    permutation: jax.Array | None = None
    channel_scales: jax.Array | None = None
    table: jax.Array | None = None
    activation_bits: jax.Array | None = None
    activation_scale: jax.Array | None = None

    def __repr__(self) -> str:
        """The format, the shape, and the dtype and shape of each array, without the codes.

        JAX also puts other objects in the arrays' fields, such as partition specs.
        """
        arrays = {name: getattr(self, name) for name in ARRAYS}
        has_shape = len(getattr(self.words, "shape", ())) >= 3
        shown = [f"{self.format} {list(self.shape)}" if has_shape else f"{self.format}"]
        shown += [f"{name}={_kind(array)}" for name, array in arrays.items() if array is not None]
        return f"QuantizedTensor({', '.join(shown)})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., K, N]."""
        *leading, _, outputs, _ = self.words.shape
        return *leading, self.padded_channels - self.padding, outputs

    @property
    def padded_channels(self) -> int:
        """K with padding, a multiple of the format's block."""
        *_, blocks, _, words = self.words.shape
        return blocks * words // self.format.columns * self.format.planes

    @property
    def activations(self) -> ActivationFormat | ActivationBlocks | StaticRows:
        """How the activations that multiply the weight are rounded: in blocks for `int4`."""
        if self.format.codes == "int4":
            return ActivationBlocks(self.activation_bits, self.permutation)
        found = ActivationFormat.of(self.format)
        if self.activation_scale is None:
            return found
        return StaticRows(found, self.activation_scale)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays in device memory; also for shapes, as from `jax.eval_shape`."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def scales(self) -> jax.Array:
        """The scales, or the steps of `liquid4`, [..., groups, N] in `scale_dtype`.

        Groups of padding are included.
        """
        return self._scales_and_zeros[0]

    def zeros(self) -> jax.Array:
        """The zero points [..., groups, N] in uint16, groups of padding included.

        For `affine…` the minima, in `scale_dtype`.
        """
        return self._scales_and_zeros[1]

    @property
    def _scales_and_zeros(self) -> tuple[jax.Array, jax.Array]:
        return code_kinds.of(self.format).unpack_parameters(self.parameters, self.scale_dtype)

    def dequantize(
        self, dtype: jax.typing.DTypeLike = jnp.float32, *, scales: jax.Array | None = None
    ) -> jax.Array:
        """The weight [..., K, N] in the order of the input channels, computed in float32.

        scales: [..., groups, N] instead of the tensor's own, without groups of padding.
        Raises ValueError for scales of another shape, and for any scales if the format is
        `liquid4`, whose steps are integers, or `float4`, whose scales are exponents.
        """
        dtype = as_dtype("dequantize: dtype", dtype)
        plain = unpack(self)
        if scales is not None:
            plain = dataclasses.replace(plain, scales=_read_scales(self, scales))
        return plain.dequantize(dtype)


def _kind(array: Any) -> str:
    """The dtype and shape of an array, such as `uint16[1, 512, 64]`; `repr` of other objects."""
    if not hasattr(array, "dtype"):
        return repr(array)
    return f"{array.dtype}{list(array.shape)}"


def pack(plain: PlainCodes) -> QuantizedTensor:
    """Packs plain codes into the layout of the kernels; `unpack` is the exact inverse.

    Raises ValueError for shapes and dtypes that don't fit. If values are known, unlike under `jit`,
    it also raises ValueError for codes or zero points that are too large, for code · step + offset
    above 255 in `liquid4`, and for an invalid permutation.
    """
    require_type("pack: plain", plain, PlainCodes)
    plain = read_arrays("pack", plain)
    require_sound(plain)
    return _pack(plain)


@jax.jit
def _pack(plain: PlainCodes) -> QuantizedTensor:
    return over_leading_axes(_pack_matrix, len(plain.shape) - 2)(plain)


def _pack_matrix(plain: PlainCodes) -> QuantizedTensor:
    format, kind = plain.format, code_kinds.of(plain.format)
    padding = format.padding(plain.codes.shape[0])
    codes = jnp.pad(plain.codes, ((0, padding), (0, 0)))
    scales, zeros = plain.scales, plain.zeros
    if zeros is None:
        zeros = jnp.full_like(scales, kind.zero_point, jnp.uint16)
    zeros = zeros.astype(scales.dtype if kind.has_minima else jnp.uint16)
    missing = (0, format.groups(codes.shape[0]) - len(scales)), (0, 0)
    scales, zeros = jnp.pad(scales, missing), jnp.pad(zeros, missing)
    return QuantizedTensor(
        _pack_words(codes, format),
        kind.pack_parameters(scales, zeros),
        format,
        scales.dtype.name,
        padding,
        None if plain.permutation is None else plain.permutation.astype(jnp.int32),
        plain.channel_scales,
        plain.table,
        None if plain.activation_bits is None else plain.activation_bits.astype(jnp.uint8),
        plain.activation_scale,
    )


def _pack_words(codes: jax.Array, format: WeightFormat) -> jax.Array:
    if format.is_flat:
        return codes.T[None]
    planes = codes.reshape(-1, format.planes, format.plane_width, codes.shape[1])
    planes = planes.transpose(0, 3, 1, 2)  # [blocks, N, planes, plane width]
    if jnp.issubdtype(codes.dtype, jnp.integer):
        planes = planes.astype(jnp.uint8)
    else:
        planes = jax.lax.bitcast_convert_type(planes, jnp.uint8)
    words = code_kinds.of(format).pack(planes)  # [blocks, N, columns, plane width]
    return words.reshape(*words.shape[:2], -1)


def _unpack_words(tensor: QuantizedTensor) -> jax.Array:
    """The codes [K, N] of one matrix, bit for bit as packed, in the order of packed rows."""
    format = tensor.format
    if format.is_flat:
        return tensor.words[0].T[: tensor.shape[0]]
    words = tensor.words.reshape(*tensor.words.shape[:2], format.columns, -1)
    planes = code_kinds.of(format).unpack(words)  # [blocks, N, planes, plane width]
    codes = planes.transpose(0, 2, 3, 1).reshape(-1, words.shape[1])[: tensor.shape[0]]
    return jax.lax.bitcast_convert_type(codes, code_kinds.of(format).code_dtype)


def unpack(tensor: QuantizedTensor) -> PlainCodes:
    """The plain codes of a tensor, bit for bit as packed: codes in uint8, int8 or float8_e4m3fn.

    Zero points are uint16, and minima float16.
    """
    require_type("unpack: tensor", tensor, QuantizedTensor)
    return _unpack(tensor)


@jax.jit
def _unpack(tensor: QuantizedTensor) -> PlainCodes:
    return over_leading_axes(_unpack_matrix, len(tensor.shape) - 2)(tensor)


def _unpack_matrix(tensor: QuantizedTensor) -> PlainCodes:
    groups = tensor.format.groups(tensor.shape[0])
    return PlainCodes(
        tensor.format,
        _unpack_words(tensor),
        tensor.scales()[:groups],
        tensor.zeros()[:groups] if code_kinds.of(tensor.format).has_zeros else None,
        tensor.permutation,
        tensor.channel_scales,
        tensor.table,
        tensor.activation_bits,
        tensor.activation_scale,
    )


def replace_scales(tensor: QuantizedTensor, scales: jax.Array) -> QuantizedTensor:
    """The tensor with other scales, such as learned ones, rounded to its `scale_dtype`.

    scales: [..., groups, N]. `matmul(x, tensor, scales=scales)` rounds scales in the same way, and
        gives the same product as the returned tensor.

    Raises ValueError for scales of another shape, for `liquid4`, whose steps are integers, for
    `float4`, whose scales are exponents, and, if values are known, for scales that are NaN,
    infinite or beyond the range of the dtype.
    """
    require_type("replace_scales: tensor", tensor, QuantizedTensor)
    replaced = with_scales(tensor, scales)
    if is_known(replaced) and not are_finite(replaced.scales()):
        raise ValueError(
            f"replace_scales: some scales are NaN, infinite or beyond the range of "
            f"{tensor.scale_dtype}, in which {tensor.format} keeps them: expected finite ones"
        )
    return replaced


def with_scales(tensor: QuantizedTensor, scales: jax.Array) -> QuantizedTensor:
    """`replace_scales` without a check of the values, which would wait for the device."""
    scales = _read_scales(tensor, scales)
    missing = tensor.scales().shape[-2] - scales.shape[-2]
    padding = *((0, 0),) * (scales.ndim - 2), (0, missing), (0, 0)
    scales = jnp.pad(scales.astype(tensor.scale_dtype), padding)
    parameters = code_kinds.of(tensor.format).pack_parameters(scales, tensor.zeros())
    return dataclasses.replace(tensor, parameters=parameters)


def concatenate(tensors: list[QuantizedTensor]) -> QuantizedTensor | None:
    """Concatenates tensors along the output channels; None unless they share a layout.

    Tensors share a layout if their formats, leading axes, K, scale dtypes, permutations, tables,
    activation bits and activation scales are equal. These arrays are copied from the device for the
    comparison.
    """
    first = tensors[0]
    if len({(tensor.format, tensor.shape[:-1], tensor.scale_dtype) for tensor in tensors}) > 1:
        return None
    for shared in ("permutation", "table", "activation_bits", "activation_scale"):
        arrays = [getattr(tensor, shared) for tensor in tensors]
        if any((array is None) != (arrays[0] is None) for array in arrays):
            return None
        if arrays[0] is not None and not all(jnp.array_equal(arrays[0], a) for a in arrays[1:]):
            return None
    channel_scales = [t.channel_scales for t in tensors if t.channel_scales is not None]
    return dataclasses.replace(
        first,
        words=jnp.concatenate([tensor.words for tensor in tensors], axis=-2),
        parameters=jnp.concatenate([tensor.parameters for tensor in tensors], axis=-1),
        channel_scales=jnp.concatenate(channel_scales, axis=-1) if channel_scales else None,
    )


def split(tensor: QuantizedTensor, sizes: Sequence[int]) -> list[QuantizedTensor]:
    """Splits a tensor into tensors with these numbers of output channels: undoes `concatenate`."""
    ends = [0, *itertools.accumulate(sizes)]
    return [
        dataclasses.replace(
            tensor,
            words=tensor.words[..., begin:end, :],
            parameters=tensor.parameters[..., begin:end],
            channel_scales=None
            if tensor.channel_scales is None
            else tensor.channel_scales[..., begin:end],
        )
        for begin, end in itertools.pairwise(ends)
    ]


def take_outputs(tensor: QuantizedTensor, indices: jax.Array) -> QuantizedTensor:
    """The tensor of the output channels `indices`, int [count], in their order; also under `jit`.

    Indices beyond the last output channel give zeros, infinities or NaN.
    """
    scales = tensor.channel_scales
    return dataclasses.replace(
        tensor,
        words=jnp.take(tensor.words, indices, axis=-2),
        parameters=jnp.take(tensor.parameters, indices, axis=-1),
        channel_scales=None if scales is None else jnp.take(scales, indices, axis=-1),
    )


def _read_scales(tensor: QuantizedTensor, scales: Any) -> jax.Array:
    """Scales [..., groups, N] instead of a tensor's own.

    Raises ValueError for another shape, and if a tensor's scales are fixed.
    """
    if reason := code_kinds.of(tensor.format).why_scales_are_fixed:
        raise ValueError(f"{tensor.format} {reason}")
    scales = as_array("scales", scales)
    *leading, input_channels, output_channels = tensor.shape
    expected = (*leading, tensor.format.groups(input_channels), output_channels)
    if scales.shape != expected:
        raise ValueError(f"scales have shape {scales.shape}; {tensor.format} expects {expected}")
    return scales

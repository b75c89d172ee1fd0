"""The packed weight that every format fills."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import codes as code_kinds
from mpjax.kernels.checks import (
    are_finite,
    as_array,
    as_arrays,
    as_dtype,
    is_known,
    optional_array,
    require_type,
)
from mpjax.kernels.codes.base import by_group
from mpjax.kernels.formats import WeightFormat


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["words", "parameters", "permutation", "channel_scales", "table"],
    meta_fields=["format", "channels", "scale_dtype"],
)
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A packed weight matrix W [K, N]; `mpjax.kernels.codes` says what its codes mean.

    words: [K blocks, N, columns · plane width], unsigned, as wide as the operand that they become.
        A lane's words hold one code of each plane: code j is that of input channel
        i·block + j·plane_width + lane. A tile of neighbouring output channels is contiguous.
        Where a word is a code, the plain matrix [1, N, padded K] in int8 or float8_e4m3fn.
    parameters: uint32 [groups, N], a group's parameters in one 32-bit word, because narrower loads
        are not pipelined: the scale's 16 bits below the zero point (0 where codes have none), or
        the 32 bits of a float32 scale. Of `liquid4` [groups / 2, N]: the step and the offset of a
        group, a byte each, below those of the next.
    permutation: int32 [K] or None; row i of the packed matrix belongs to input channel
        permutation[i] (GPTQ's act-order).
    channel_scales: float32 [N], the second level of `liquid4`, else None.
    table: float32 [2**bits], the values of `table…` codes, else None.
    channels: K before padding; the codes of padded channels meet zeros of the activations.
    scale_dtype: what the scales in `parameters` are: `float16`, `bfloat16`, `float32`, or `uint16`
        for the steps of `liquid4`.
    """

    words: jax.Array
    parameters: jax.Array
    permutation: jax.Array | None
    format: WeightFormat
    channels: int
    scale_dtype: str
    channel_scales: jax.Array | None = None
    table: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape [K, N]."""
        return self.channels, self.words.shape[1]

    @property
    def padded_channels(self) -> int:
        """K rounded up to whole blocks."""
        blocks, _, words = self.words.shape
        return blocks * words // self.format.columns * self.format.planes

    @property
    def nbytes(self) -> int:
        """Bytes in device memory; of shapes alone, as `jax.eval_shape` gives, what they'd take."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def scales(self) -> jax.Array:
        """Scales [groups, N] in `scale_dtype`, padding groups included; of `liquid4`, the steps."""
        return self._scales_and_zeros[0]

    def zeros(self) -> jax.Array:
        """Integer zero points [groups, N] as uint16; padding groups included."""
        return self._scales_and_zeros[1]

    @property
    def _scales_and_zeros(self) -> tuple[jax.Array, jax.Array]:
        return code_kinds.of(self.format).unpack_parameters(self.parameters, self.scale_dtype)

    def dequantize(
        self, dtype: jax.typing.DTypeLike = jnp.float32, *, scales: jax.Array | None = None
    ) -> jax.Array:
        """The matrix [K, N] in the order of the input channels, computed in float32.

        scales: [groups, N], without padding groups, in the place of the tensor's own.

        Raises ValueError for another shape, and for `liquid4`, whose steps are integers.
        """
        dtype = as_dtype("dequantize: dtype", dtype)
        if scales is None:
            scales = self.scales()[: self.format.groups(self.channels)]
        elif code_kinds.of(self.format).has_channel_scales:
            raise ValueError(f"{self.format} has integer steps, which other scales can't replace")
        else:
            scales = _read_scales(self, scales)
        values = code_kinds.of(self.format).dequantize(unpack_codes(self), self, scales)
        if self.permutation is not None:
            values = jnp.zeros_like(values).at[self.permutation].set(values)
        return values.astype(dtype)


def pack(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    format: WeightFormat | str,
    permutation: jax.Array | None = None,
    *,
    channel_scales: jax.Array | None = None,
    table: jax.Array | None = None,
) -> QuantizedTensor:
    """Packs plain codes into the layout that the kernels read; `unpack` is its exact inverse.

    codes: [K, N], K a multiple of the group size, but any for `float8`, whose last group may be
        cut: unsigned integers, int8 for `int8` and float8_e4m3fn for `float8`.
    scales: [groups, N]: float16 or bfloat16 for `uint…` and `table…`, float32 for `int8` and
        `float8`, uint16 steps up to 255 for `liquid4`.
    zeros: integers [groups, N]: the zero points of `uint…`, from 0 to 2**bits; the offsets of
        `liquid4`, to 255; None for the others, and for symmetric codes: all have 2**(bits − 1).
    format: a WeightFormat, or what WeightFormat.parse reads, such as "uint4:g128".
    permutation: integers [K], each of range(K) once.
    channel_scales, table: see QuantizedTensor.

    Raises ValueError where a shape or a dtype does not fit, codes or zero points are too large,
    code · step + offset of `liquid4` is more than a byte, or a permutation is none: values are
    looked at where they are known, as they are not under `jit`.
    """
    format = WeightFormat.of(format)
    codes, scales = as_arrays("pack", codes=codes, scales=scales)
    zeros, permutation, channel_scales, table = (
        optional_array(f"pack: {name}", value)
        for name, value in (
            ("zeros", zeros),
            ("permutation", permutation),
            ("channel_scales", channel_scales),
            ("table", table),
        )
    )
    _check(codes, scales, zeros, format, permutation, channel_scales, table)
    if code_kinds.of(format).code_dtype == jnp.uint8:
        _check_values("codes", codes, 2**format.bits - 1)
    if zeros is not None:
        _check_values("zeros", zeros, 255 if format.codes == "liquid4" else 2**format.bits)
    if format.codes == "liquid4":
        _check_values("scales", scales, 255)
        assert zeros is not None
        _check_bytes(codes, scales, zeros)
    if permutation is not None:
        _check_permutation(permutation)
    return _pack(codes, scales, zeros, format, permutation, channel_scales, table)


@functools.partial(jax.jit, static_argnames="format")
def _pack(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    format: WeightFormat,
    permutation: jax.Array | None,
    channel_scales: jax.Array | None,
    table: jax.Array | None,
) -> QuantizedTensor:
    padding = -codes.shape[0] % format.block
    codes = jnp.pad(codes, ((0, padding), (0, 0)))
    kind = code_kinds.of(format)
    if zeros is None:
        zeros = jnp.full_like(scales, kind.zero_point, jnp.uint16)
    missing = (0, format.groups(codes.shape[0]) - len(scales)), (0, 0)
    scales, zeros = jnp.pad(scales, missing), jnp.pad(zeros.astype(jnp.uint16), missing)
    return QuantizedTensor(
        _pack_words(codes, format),
        kind.pack_parameters(scales, zeros),
        None if permutation is None else permutation.astype(jnp.int32),
        format,
        codes.shape[0] - padding,
        scales.dtype.name,
        channel_scales,
        table,
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


def unpack_codes(tensor: QuantizedTensor) -> jax.Array:
    """Codes [K, N] bit for bit as packed, in packed order: see `permutation`."""
    format = tensor.format
    if format.is_flat:
        return tensor.words[0].T[: tensor.channels]
    words = tensor.words.reshape(*tensor.words.shape[:2], format.columns, -1)
    planes = code_kinds.of(format).unpack(words)  # [blocks, N, planes, plane width]
    codes = planes.transpose(0, 2, 3, 1).reshape(-1, words.shape[1])[: tensor.channels]
    return jax.lax.bitcast_convert_type(codes, code_kinds.of(format).code_dtype)


def unpack(tensor: QuantizedTensor) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes [K, N], scales [groups, N] and zeros uint16 [groups, N], bit for bit as packed.

    Codes are in packed order: with act-order, row i belongs to input channel permutation[i].
    Formats without zero points have zeros of 0, and symmetric ones the middle, which `pack` does
    not take.
    """
    require_type("unpack: tensor", tensor, QuantizedTensor)
    return _unpack(tensor)


@jax.jit
def _unpack(tensor: QuantizedTensor) -> tuple[jax.Array, jax.Array, jax.Array]:
    groups = tensor.format.groups(tensor.channels)
    return unpack_codes(tensor), tensor.scales()[:groups], tensor.zeros()[:groups]


def replace_scales(tensor: QuantizedTensor, scales: jax.Array) -> QuantizedTensor:
    """The tensor with other scales [groups, N], such as learned ones, rounded to its scale_dtype.

    `matmul(x, tensor, scales=scales)` rounds them so, too: the product is the same.

    Raises ValueError for another shape, for `liquid4`, whose steps are integers, and, where values
    are known, for scales that are NaN, infinite or beyond the range of the dtype.
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
    """`replace_scales` without a look at the values, which would wait for the device."""
    kind = code_kinds.of(tensor.format)
    if kind.has_channel_scales:
        raise ValueError(f"{tensor.format} has integer steps: replace its channel_scales instead")
    scales = _read_scales(tensor, scales)
    padding = ((0, len(tensor.parameters) - len(scales)), (0, 0))
    scales = jnp.pad(scales.astype(tensor.scale_dtype), padding)
    return dataclasses.replace(tensor, parameters=kind.pack_parameters(scales, tensor.zeros()))


def concatenate(tensors: list[QuantizedTensor]) -> QuantizedTensor | None:
    """One tensor with the output channels of all, or None where they don't share a layout.

    Layouts agree when format, input channels, scale dtype, permutation and table are equal;
    checking permutations and tables reads them back from the device.
    """
    first = tensors[0]
    if len({(tensor.format, tensor.channels, tensor.scale_dtype) for tensor in tensors}) > 1:
        return None
    for shared in ("permutation", "table"):
        arrays = [getattr(tensor, shared) for tensor in tensors]
        if any((array is None) != (arrays[0] is None) for array in arrays):
            return None
        if arrays[0] is not None and not all(jnp.array_equal(arrays[0], a) for a in arrays[1:]):
            return None
    channel_scales = [t.channel_scales for t in tensors if t.channel_scales is not None]
    return dataclasses.replace(
        first,
        words=jnp.concatenate([tensor.words for tensor in tensors], axis=1),
        parameters=jnp.concatenate([tensor.parameters for tensor in tensors], axis=1),
        channel_scales=jnp.concatenate(channel_scales) if channel_scales else None,
    )


def _check(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    format: WeightFormat,
    permutation: jax.Array | None,
    channel_scales: jax.Array | None,
    table: jax.Array | None,
) -> None:
    if not format.is_packed:
        raise ValueError(f"{format} is not packed: a plain array needs no packing")
    format.require_matrix(codes.shape, "codes")
    kind = code_kinds.of(format)
    unsigned = kind.code_dtype == jnp.uint8 and jnp.issubdtype(codes.dtype, jnp.unsignedinteger)
    if not unsigned and codes.dtype != kind.code_dtype:
        wanted_dtype = "unsigned integers" if kind.code_dtype == jnp.uint8 else kind.code_dtype
        raise ValueError(f"codes have dtype {codes.dtype}; expected {wanted_dtype}")
    channels, outputs = codes.shape
    groups = format.groups(channels), outputs
    wanted = {
        "scales": (scales, groups),
        "zeros": (zeros, groups if kind.has_zeros else None),
        "permutation": (permutation, (channels,) if permutation is not None else None),
        "channel_scales": (channel_scales, (outputs,) if kind.has_channel_scales else None),
        "table": (table, (2**format.bits,) if kind.has_table else None),
    }
    for name, (array, expected) in wanted.items():
        found = None if array is None else array.shape
        if found != expected:
            raise ValueError(f"{name}: the shape is {found}, and {format} expects {expected}")
    if scales.dtype.name not in kind.scale_dtypes:
        raise ValueError(
            f"scales have dtype {scales.dtype}; expected {' or '.join(kind.scale_dtypes)}"
        )
    for name, indices in (("zeros", zeros), ("permutation", permutation)):
        if indices is not None and not jnp.issubdtype(indices.dtype, jnp.integer):
            raise ValueError(
                f"{name}: the dtype is {indices.dtype}; expected integers: convert them"
            )


def _check_values(name: str, array: jax.Array, largest: int) -> None:
    if not is_known(array):
        return
    with jax.ensure_compile_time_eval():  # under `jit`, too, of what is no argument there
        low, high = int(array.min()), int(array.max())
    if low < 0 or high > largest:
        raise ValueError(f"{name} are {low} to {high}; expected 0 to {largest}")


def _check_bytes(codes: jax.Array, steps: jax.Array, offsets: jax.Array) -> None:
    if not is_known((codes, steps, offsets)):
        return
    with jax.ensure_compile_time_eval():
        peaks = by_group(jnp.asarray(codes), len(steps)).max(1)
        peaks, steps, offsets = (jnp.asarray(x).astype(jnp.int32) for x in (peaks, steps, offsets))
        largest = int((peaks * steps + offsets).max())
    if largest > 255:  # a carry into the byte of another code
        raise ValueError(
            f"code · step + offset is up to {largest}; expected at most 255, a byte: choose "
            "smaller steps or offsets"
        )


def _check_permutation(permutation: jax.Array) -> None:
    if not is_known(permutation):
        return
    found = np.asarray(permutation)
    missing = np.setdiff1d(np.arange(len(found)), found)
    if missing.size:  # else there is room for nothing else
        raise ValueError(
            f"permutation lacks {missing.size} of {len(found)} channels, such as {missing[0]}; "
            f"expected each of 0 to {len(found) - 1} once"
        )


def _read_scales(tensor: QuantizedTensor, scales: Any) -> jax.Array:
    scales = as_array("scales", scales)
    expected = (tensor.format.groups(tensor.channels), tensor.shape[1])
    if scales.shape != expected:
        raise ValueError(f"scales have shape {scales.shape}; {tensor.format} expects {expected}")
    return scales

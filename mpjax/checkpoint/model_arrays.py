"""Names a decoder's arrays as in a saved model: takes them out, checks them, puts them in.

An array outside linear maps is named by its path, such as `layers.0.mlp_norm.weight`. For a linear
map, the path is followed by the index of a part and a name: `kernel` or `bias`, as in
`layers.0.attention.qkv.0.kernel`, or an array of a packed kernel, as in
`layers.0.attention.qkv.0.words`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax.kernels import QuantizedTensor, WeightFormat
from mpjax.kernels.packed_shapes import packed_shapes
from mpjax.models import ArrayPlace, Decoder, DecoderConfig, Linear, LinearPlace
from mpjax.models.config_checks import DTYPES

# Array fields of a QuantizedTensor; fields that the format doesn't use are None.
PACKED_ARRAYS = (
    *("words", "parameters", "permutation", "channel_scales", "table", "activation_bits"),
    "activation_scale",
)
CACHE_SCALES = "cache_scales"


class PackedPart(NamedTuple):
    """The static fields of a packed kernel; see QuantizedTensor."""

    format: WeightFormat
    scale_dtype: str


# Path of a linear map → its parts in order; None for a part with an unpacked kernel.
Parts = Mapping[str, Sequence[PackedPart | None]]


class _Expected(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]  # alternatives
    dtypes: tuple[str, ...]  # alternatives


def take(model: Decoder, prefix: str = "") -> dict[str, jax.Array]:
    """The arrays of a model, by name. prefix: of the names to take, such as `layers.0.`."""
    array_places, linear_places = _places(model, prefix)
    arrays = {place.path: place.read(model) for place in array_places}
    for place in linear_places:
        parts = [
            (linear.kernel.get_value(), None if linear.bias is None else linear.bias.get_value())
            for linear in place.parts(model)
        ]
        arrays |= of_linears(place.path, parts)
    if model.cache_scales is not None and CACHE_SCALES.startswith(prefix):
        arrays[CACHE_SCALES] = model.cache_scales.get_value()
    return arrays


def of_linears(path: str, parts: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The arrays of the parts at a path, by name. parts: kernels and biases."""
    arrays = {}
    for index, (kernel, bias) in enumerate(parts):
        if isinstance(kernel, QuantizedTensor):
            for name in PACKED_ARRAYS:
                if (array := getattr(kernel, name)) is not None:
                    arrays[f"{path}.{index}.{name}"] = array
        else:
            arrays[f"{path}.{index}.kernel"] = kernel
        if bias is not None:
            arrays[f"{path}.{index}.bias"] = bias
    return arrays


def to_linears(
    path: str, parts: Sequence[PackedPart | None], arrays: Mapping[str, Any], inputs: int
) -> list[tuple[Any, Any]]:
    """The kernels and biases of the parts at a path; the inverse of `of_linears`.

    inputs: the input channels of each.
    """
    found = []
    for index, part in enumerate(parts):
        if part is None:
            kernel = arrays[f"{path}.{index}.kernel"]
        else:
            stored: dict[str, Any] = {
                name: arrays.get(f"{path}.{index}.{name}") for name in PACKED_ARRAYS
            }
            kernel = QuantizedTensor(
                format=part.format,
                scale_dtype=part.scale_dtype,
                padding=part.format.padding(inputs),
                **stored,
            )
        found.append((kernel, arrays.get(f"{path}.{index}.bias")))
    return found


def take_parts(model: Decoder) -> dict[str, list[PackedPart | None]]:
    """Parts of a model's linear maps, by path."""
    return {
        place.path: [
            PackedPart(kernel.format, kernel.scale_dtype)
            if isinstance(kernel, QuantizedTensor)
            else None
            for kernel in place.kernels(model)
        ]
        for place in model.linear_places(model.config)
    }


def put(model: Decoder, arrays: Mapping[str, Any], parts: Parts, prefix: str = "") -> None:
    """Puts arrays or ShapeDtypeStructs into a model; the inverse of `take` and `take_parts`."""
    array_places, linear_places = _places(model, prefix)
    for place in array_places:
        model.put_array(place, arrays[place.path])
    for linear_place in linear_places:
        path, inputs = linear_place.path, linear_place.shapes[0][0]
        pairs = to_linears(path, parts[path], arrays, inputs)
        model.put_linears(linear_place, [Linear(kernel, bias) for kernel, bias in pairs])
    if (scales := arrays.get(CACHE_SCALES)) is not None:
        model.put_cache_scales(scales)


def _places(model: Decoder, prefix: str) -> tuple[list[ArrayPlace], list[LinearPlace]]:
    config = model.config
    arrays = [place for place in model.array_places(config) if place.path.startswith(prefix)]
    linears = [place for place in model.linear_places(config) if place.path.startswith(prefix)]
    return arrays, linears


def require_fitting(
    decoder: type[Decoder], config: DecoderConfig, parts: Parts, arrays: Mapping[str, Any]
) -> None:
    """Raises ValueError unless names, shapes and dtypes of `arrays` are those of the model.

    arrays: by name; objects with shape and dtype suffice.
    """
    if config.num_layers > len(arrays):  # checked before a list with an entry per layer is made
        raise ValueError(f"there are {config.num_layers} layers and only {len(arrays)} arrays")
    expected = _expected(decoder, config, parts, arrays)
    for name in sorted(expected.keys() ^ arrays.keys()):
        if name in expected:
            raise ValueError(f"the array {name} is missing")
        raise ValueError(f"there is an array {name!r:.80}, which such a model does not have")
    for name, (shapes, dtypes) in expected.items():
        array = arrays[name]
        dtype = jnp.dtype(array.dtype).name
        if tuple(array.shape) not in shapes or dtype not in dtypes:
            raise ValueError(
                f"the array {name} is {dtype} {list(array.shape)}: expected {' or '.join(dtypes)} "
                + " or ".join(str(list(shape)) for shape in shapes)
            )


def _expected(
    decoder: type[Decoder], config: DecoderConfig, parts: Parts, arrays: Mapping[str, Any]
) -> dict[str, _Expected]:
    expected = {
        place.path: _Expected((place.shape,), DTYPES) for place in decoder.array_places(config)
    }
    places = decoder.linear_places(config)
    if (paths := {place.path for place in places}) != parts.keys():
        wrong = sorted(paths ^ parts.keys())[0]
        raise ValueError(f"linear maps: {wrong!r:.80} is missing, or no model has it")
    for place in places:
        expected |= _expected_of_linear(place, parts[place.path], arrays)
    if CACHE_SCALES in arrays:
        of_heads = (config.num_layers, 2, config.num_kv_heads)
        expected[CACHE_SCALES] = _Expected((of_heads, (*of_heads, config.head_dim)), ("float32",))
    return expected


def _expected_of_linear(
    place: LinearPlace, parts: Sequence[PackedPart | None], arrays: Mapping[str, Any]
) -> dict[str, _Expected]:
    expected: dict[str, _Expected] = {}
    shapes = place.part_shapes(len(parts))
    for index, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        path = f"{place.path}.{index}"
        if part is None and place.is_table:
            raise ValueError(f"{place.path} has no format: expected a packed one")
        if part is None:
            expected[f"{path}.kernel"] = _Expected((shape,), DTYPES)
        else:
            packed = packed_shapes(
                *(shape, part.format, part.scale_dtype),
                permuted=f"{path}.permutation" in arrays,
                mixed=f"{path}.activation_bits" in arrays,
                static=f"{path}.activation_scale" in arrays,
            )
            for name in PACKED_ARRAYS:
                if (array := getattr(packed, name)) is not None:
                    expected[f"{path}.{name}"] = _Expected((array.shape,), (array.dtype.name,))
        if place.bias:
            expected[f"{path}.bias"] = _Expected(((*shape[:-2], shape[-1]),), DTYPES)
    return expected

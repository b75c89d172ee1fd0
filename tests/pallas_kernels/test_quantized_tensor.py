from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels import PlainCodes, QuantizedTensor, WeightFormat, pack, unpack
from mpjax.kernels import codes as code_kinds
from mpjax.kernels.quantized_tensor import concatenate, replace_scales, split, take_outputs
from tests.pallas_kernels.oracles import (
    NUMPY_DTYPES,
    PACKED_FORMATS,
    PlainWeight,
    most_formats,
)
from tests.sweeps import in_sweep

# Symmetric codes lie as others do.
LAYOUTS = [text for text in PACKED_FORMATS if ":sym" not in text]
FORMAT = WeightFormat.parse("uint4:g32")
each_layout = pytest.mark.parametrize("text", most_formats(LAYOUTS))
# One of every kind of codes, and of every width.
KINDS = [
    *("uint4:g32", "uint8:g32", "table4:g64", "table3:g32", "table2:g32", "float8:g128"),
    *("float8:gK", "float8:g128/float8", "int8/int8", "liquid4:g64"),
]
each_kind = pytest.mark.parametrize("text", KINDS)
# A permutation, a table with narrow planes, scales of blocks, and those of channels and groups.
SOME = ("table3:g32", "float8:g128", "liquid4:g64")
each_case_of_some = pytest.mark.parametrize(
    ("text", "permuted"),
    [
        *((text, False) if text in SOME else in_sweep(text, False) for text in KINDS),
        ("uint4:g32", True),
    ],
)


def assert_same(actual: jax.Array, expected: np.ndarray) -> None:
    """Fails unless both have one dtype, one shape and equal bits."""
    found = np.asarray(actual)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    unsigned = f"u{found.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(found).view(unsigned), np.ascontiguousarray(expected).view(unsigned)
    )


@jax.jit
def read(tensor: QuantizedTensor) -> tuple[PlainCodes, jax.Array]:
    """In one program, which is quicker to compile than each operation by itself."""
    return unpack(tensor), tensor.dequantize()


def assert_packed(tensor: QuantizedTensor, plain: PlainWeight, permutation=None) -> None:
    format, (channels, outputs) = plain.format, plain.codes.shape
    assert (tensor.format, tensor.shape) == (format, (channels, outputs))
    assert tensor.padded_channels % format.block == 0
    assert 0 <= tensor.padded_channels - channels < format.block

    assert_same(tensor.words, plain.words())
    parameters = plain.parameters()
    assert_same(tensor.parameters[: len(parameters)], parameters)
    assert not np.asarray(tensor.parameters)[len(parameters) :].any()
    groups = format.groups(tensor.padded_channels)
    assert len(tensor.parameters) == groups // format.groups_of_word

    found, dequantized = read(tensor)
    assert found.format == format
    assert_same(found.codes, plain.codes.astype(code_kinds.of(format).code_dtype))
    assert_same(found.scales, plain.scales)
    zeros = plain.zero_points()
    assert_same(tensor.zeros()[: len(zeros)], zeros)
    expected = {"zeros": plain.zeros, "channel_scales": plain.channel_scales, "table": plain.table}
    for name, array in (expected | {"permutation": permutation}).items():
        assert (getattr(found, name) is None) == (array is None)
        if array is not None:
            dtype = {"permutation": np.int32, "zeros": zeros.dtype}.get(name, array.dtype)
            assert_same(getattr(found, name), array.astype(dtype))
    assert tensor.scale_dtype == plain.scales.dtype.name

    values = plain.values()
    if permutation is not None:
        values = values[np.argsort(permutation)]
    assert dequantized.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(dequantized, np.float64), values)

    order = 0 if permutation is None else 4 * channels
    assert tensor.nbytes == format.nbytes((channels, outputs)) + order


@each_layout
def test_packs_bit_for_bit(text, rng):
    """Blocks that are full and one that isn't, groups of padding, an odd number of outputs."""
    format = WeightFormat.parse(text)
    channels = format.group_size * 5 if format.group_size else 2 * format.block + 51
    plain = PlainWeight.random(rng, format, channels, 5)
    assert_packed(plain.pack(), plain)


@st.composite
def weights(draw) -> tuple[PlainWeight, np.ndarray | None]:
    format = WeightFormat.parse(draw(st.sampled_from(PACKED_FORMATS)))
    multiple = format.group_size or draw(st.sampled_from([1, 2, 51]))
    channels = multiple * draw(st.integers(1, 9))
    outputs = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["bfloat16", "float16"]))
    permutation = rng.permutation(channels).astype(np.int32) if draw(st.booleans()) else None
    return PlainWeight.random(rng, format, channels, outputs, dtype), permutation


@settings(max_examples=20)
@given(weights())
def test_packs_any_shape_in_any_order(weight):
    plain, permutation = weight
    assert_packed(plain.pack(permutation), plain, permutation)


@pytest.mark.parametrize("text", ["uint8:g32", "table3:g32", "float8:g128", "liquid4:g64"])
def test_dequantize_to_sixteen_bits_rounds_the_float32_value(text, rng):
    plain = PlainWeight.random(rng, WeightFormat.parse(text), 128, 6, "bfloat16")
    for name, dtype in NUMPY_DTYPES.items():
        expected = plain.values().astype(np.float32).astype(dtype)
        dequantize = jax.jit(lambda tensor, name=name: tensor.dequantize(name))
        assert_same(dequantize(plain.pack()), expected)


@pytest.mark.one_of(5)
@each_kind
def test_replace_scales_replaces_nothing_else(text, rng):
    plain = PlainWeight.random(rng, WeightFormat.parse(text), 384, 3)
    tensor = plain.pack()
    scales = rng.uniform(0.1, 1, plain.scales.shape).astype(np.float32)
    if text.startswith(("liquid4", "float4")):
        with pytest.raises(ValueError, match=r"integer steps: replace its channel_|exponents for"):
            replace_scales(tensor, jnp.asarray(scales))
        return
    rounded = scales.astype(plain.scales.dtype)
    replaced = replace_scales(tensor, jnp.asarray(scales))
    assert_packed(replaced, dataclasses.replace(plain, scales=rounded))
    # The same values come from the scales given to dequantize.
    given = jax.jit(lambda tensor, scales: tensor.dequantize(scales=scales))(tensor, rounded)
    np.testing.assert_array_equal(given, read(replaced)[1])


def test_replace_scales_needs_one_scale_for_each_group(rng):
    tensor = PlainWeight.random(rng, FORMAT, 96, 3).pack()
    assert len(tensor.parameters) == 4  # one of padding
    with pytest.raises(ValueError, match=r"shape \(4, 3\); uint4:g32 expects \(3, 3\)"):
        replace_scales(tensor, tensor.scales())


def stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.one_of(3)
@each_case_of_some
def test_a_stack_is_packed_as_each_of_its_matrices(text, permuted, rng):
    """And is unpacked, dequantised and given other scales as they are."""
    format = WeightFormat.parse(text)
    plains = [
        PlainWeight.random(rng, format, 192, 3).plain(rng.permutation(192) if permuted else None)
        for _ in range(4)
    ]
    each, plain = [pack(one) for one in plains], stacked(plains)
    tensor = pack(plain)
    assert (plain.shape, tensor.shape) == ((4, 192, 3), (4, 192, 3))
    assert jax.tree.structure(tensor) == jax.tree.structure(each[0])
    assert tensor.nbytes == format.nbytes(tensor.shape) + (4 * 4 * 192 if permuted else 0)
    jax.tree.map(np.testing.assert_array_equal, tensor, stacked(each))
    jax.tree.map(np.testing.assert_array_equal, unpack(tensor), stacked([unpack(e) for e in each]))
    dense = np.stack([one.dequantize() for one in each])
    for found in (tensor.dequantize(), plain.dequantize()):
        np.testing.assert_array_equal(found, dense)
    np.testing.assert_array_equal(jax.tree.map(lambda a: a[2], tensor).dequantize(), dense[2])
    joined = concatenate([tensor, tensor])
    assert joined is not None
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate([dense, dense], 2))
    assert concatenate([tensor, each[0]]) is None
    if tensor.channel_scales is None:
        scales = jnp.asarray(rng.uniform(0.1, 1, plain.scales.shape), jnp.float32)
        expected = stacked([replace_scales(*pair) for pair in zip(each, scales, strict=True)])
        jax.tree.map(np.testing.assert_array_equal, replace_scales(tensor, scales), expected)
        with pytest.raises(ValueError, match=r"scales have shape .* expects \(4, "):
            replace_scales(tensor, scales[0])


@each_case_of_some
def test_concatenate_joins_output_channels(text, permuted, rng):
    format = WeightFormat.parse(text)
    permutation = rng.permutation(128).astype(np.int32) if permuted else None
    plains = [PlainWeight.random(rng, format, 128, outputs) for outputs in (3, 1, 3)]
    table = plains[0].table
    plains = [dataclasses.replace(plain, table=table) for plain in plains]
    packed = [plain.pack(permutation) for plain in plains]
    joined = concatenate(packed)

    def along_outputs(name: str) -> np.ndarray | None:
        arrays = [getattr(plain, name) for plain in plains]
        return None if arrays[0] is None else np.concatenate(arrays, axis=-1)

    names = ("codes", "scales", "zeros", "channel_scales")
    whole = PlainWeight(format, **{name: along_outputs(name) for name in names}, table=table)
    assert joined is not None
    assert_packed(joined, whole, permutation)
    jax.tree.map(np.testing.assert_array_equal, split(joined, (3, 1, 3)), packed)


@each_case_of_some
def test_outputs_are_taken_in_any_order(text, permuted, rng):
    plain = PlainWeight.random(rng, WeightFormat.parse(text), 128, 5)
    tensor = plain.pack(rng.permutation(128).astype(np.int32) if permuted else None)
    order = np.array([4, 0, 4, 2])
    found = take_outputs(tensor, jnp.asarray(order))
    assert found.shape == (128, 4)
    np.testing.assert_array_equal(found.dequantize(), tensor.dequantize()[:, order])


ORDER = np.arange(64, dtype=np.int32)


@pytest.mark.parametrize(
    ("text", "channels", "dtype", "permutation"),
    [
        ("uint8:g32", 64, "float16", None),
        ("uint4:g64", 64, "float16", None),
        ("uint4:g32:sym", 64, "float16", None),
        ("table4:g32", 64, "float16", None),
        ("uint4:g32", 96, "float16", None),
        ("uint4:g32", 64, "bfloat16", None),
        ("uint4:g32", 64, "float16", ORDER),
    ],
)
def test_concatenate_needs_one_layout(text, channels, dtype, permutation, rng):
    first = PlainWeight.random(rng, FORMAT, 64, 4).pack()
    other = PlainWeight.random(rng, WeightFormat.parse(text), channels, 4, dtype).pack(permutation)
    for tensors in itertools.permutations([first, other]):
        assert concatenate(list(tensors)) is None


def test_concatenate_needs_one_table(rng):
    plain = PlainWeight.random(rng, WeightFormat.parse("table2:g32"), 64, 4)
    assert plain.table is not None
    other = dataclasses.replace(plain, table=np.nextafter(plain.table, np.float32(9)))
    assert concatenate([plain.pack(), plain.pack(), other.pack()]) is None
    assert concatenate([plain.pack(), plain.pack()]) is not None

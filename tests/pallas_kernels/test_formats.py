from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import QuantizedTensor, WeightFormat, pack, unpack
from pallas_kernels.formats import concatenate
from tests.pallas_kernels.oracles import (
    NUMPY_DTYPES,
    WEIGHT_FORMATS,
    dequantized,
    parameter_words,
    plane_words,
)

each_format = pytest.mark.parametrize("text", WEIGHT_FORMATS)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A weight before packing."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @classmethod
    def random(cls, format: WeightFormat, channels: int, outputs: int, dtype: str, seed: int = 0):
        rng = np.random.default_rng(seed)
        shape = format.groups(channels), outputs
        return cls(
            rng.integers(0, 2**format.bits, (channels, outputs), dtype=np.uint8),
            (rng.standard_normal(shape) / 100).astype(NUMPY_DTYPES[dtype]),
            rng.integers(0, 2**format.bits + 1, shape, dtype=np.uint16),
        )

    def pack(self, format: WeightFormat, permutation: np.ndarray | None = None) -> QuantizedTensor:
        return pack(self.codes, self.scales, self.zeros, format, permutation)


def plane_width(format: WeightFormat) -> int:
    return 64 if format.group_size is None else min(64, format.group_size)


formats = st.builds(
    WeightFormat,
    st.sampled_from(["uint4", "uint8"]),
    st.sampled_from([32, 64, 128, None]),
    st.booleans(),
)


@st.composite
def packed_weights(draw) -> tuple[WeightFormat, Plain, np.ndarray | None]:
    format = draw(formats)
    multiple = format.group_size or draw(st.sampled_from([1, 2, 50]))
    channels = multiple * draw(st.integers(1, 7))
    outputs = draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**32 - 1))
    dtype = draw(st.sampled_from(["bfloat16", "float16"]))
    permutation = np.random.default_rng(seed).permutation(channels).astype(np.int32)
    plain = Plain.random(format, channels, outputs, dtype, seed)
    return format, plain, draw(st.sampled_from([None, permutation]))


@settings(max_examples=15)
@given(packed_weights())
def test_packing_bit_for_bit(weight):
    format, plain, permutation = weight
    tensor = plain.pack(format, permutation)
    channels, outputs = plain.codes.shape

    words = plane_words(plain.codes, format.bits, plane_width(format))
    np.testing.assert_array_equal(tensor.words, words)
    parameters = parameter_words(plain.scales, plain.zeros)
    np.testing.assert_array_equal(tensor.parameters[: len(parameters)], parameters)
    assert not np.asarray(tensor.parameters)[len(parameters) :].any()

    codes, scales, zeros = unpack(tensor)
    np.testing.assert_array_equal(codes, plain.codes)
    np.testing.assert_array_equal(np.asarray(scales), plain.scales)
    np.testing.assert_array_equal(zeros, plain.zeros)
    assert scales.dtype == plain.scales.dtype

    expected = dequantized(plain.codes, plain.scales, plain.zeros)
    if permutation is not None:
        rows = np.empty_like(expected)
        for row, channel in enumerate(permutation):
            rows[channel] = expected[row]
        expected = rows
    np.testing.assert_array_equal(np.asarray(tensor.dequantize(), np.float64), expected)

    assert tensor.shape == (channels, outputs)
    assert tensor.padded_channels % format.block == 0
    assert 0 <= tensor.padded_channels - channels < format.block
    stored = tensor.words.nbytes + tensor.parameters.nbytes
    assert format.nbytes((channels, outputs)) == stored
    assert tensor.nbytes == stored + (0 if permutation is None else 4 * channels)


@each_format
def test_a_plane_never_straddles_groups(text):
    format = WeightFormat.parse(text)
    assert format.plane_width == plane_width(format)
    assert format.block == format.plane_width * 16 // format.bits
    assert (format.group_size or format.plane_width) % format.plane_width == 0
    assert format.block % (format.group_size or format.block) == 0


def test_dequantize_to_sixteen_bits_rounds_the_exact_value():
    format = WeightFormat.parse("uint8:g32")
    plain = Plain.random(format, 64, 8, "bfloat16")
    exact = dequantized(plain.codes, plain.scales, plain.zeros)
    for name, dtype in NUMPY_DTYPES.items():
        actual = np.asarray(plain.pack(format).dequantize(name))
        np.testing.assert_array_equal(actual, exact.astype(np.float32).astype(dtype))


@given(formats)
def test_parse_inverts_str(format):
    assert WeightFormat.parse(str(format)) == format


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uint4", WeightFormat("uint4")),
        ("uint4:g32", WeightFormat("uint4", 32)),
        ("uint8:gK:sym", WeightFormat("uint8", None, True)),
        ("uint8:sym", WeightFormat("uint8", None, True)),
        ("bfloat16", WeightFormat("bfloat16")),
        ("float16", WeightFormat("float16")),
    ],
)
def test_parse(text, expected):
    assert WeightFormat.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't read the weight format ''"),
        ("uint4:128", "can't read the weight format 'uint4:128'"),
        ("uint4:g128:sym:sym", "can't read"),
        ("int4", "unknown weight format 'int4'"),
        ("uint2:g64", "unknown weight format 'uint2'"),
        ("uint4:g16", r"uint4 with group size 16: expected one of \(32, 64, 128\)"),
        ("uint4:g0", "group size 0"),
        ("bfloat16:g128", "takes no group size"),
        ("float16:sym", "no symmetry"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        WeightFormat.parse(text)


@pytest.mark.parametrize("fields", [{"group_size": 128}, {"symmetric": True}])
def test_plain_formats_have_no_groups(fields):
    with pytest.raises(ValueError, match="bfloat16 is a plain array"):
        WeightFormat("bfloat16", **fields)


def test_plain_formats_take_two_bytes_an_element():
    format = WeightFormat.parse("bfloat16")
    assert not format.is_packed
    assert format.bits == 16
    assert format.nbytes((300, 7)) == 300 * 7 * 2


def test_four_bits_with_groups_of_128_take_a_quarter_and_a_thirtysecond():
    assert WeightFormat.parse("uint4:g128").nbytes((4096, 1024)) == 4096 * 1024 // 2 * 17 // 16


FORMAT = WeightFormat.parse("uint4:g32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((48, 4), np.uint8)}, "48 input channels can't be split into groups"),
        ({"codes": np.zeros(64, np.uint8)}, r"codes have shape \(64,\)"),
        ({"codes": np.zeros((64, 4), np.int8)}, "codes have dtype int8"),
        ({"scales": np.ones((1, 4), np.float16)}, r"scales have shape \(1, 4\).*\(2, 4\)"),
        ({"zeros": np.ones((2, 5), np.uint8)}, r"zeros have shape \(2, 5\).*\(2, 4\)"),
        ({"scales": np.ones((2, 4), np.float32)}, "scales have dtype float32"),
        ({"permutation": np.arange(32, dtype=np.int32)}, r"permutation has shape \(32,\)"),
        ({"format": WeightFormat.parse("bfloat16")}, "bfloat16 is not packed"),
    ],
)
def test_pack_refuses(change, message):
    arguments = {
        "codes": np.zeros((64, 4), np.uint8),
        "scales": np.ones((2, 4), np.float16),
        "zeros": np.zeros((2, 4), np.uint8),
        "format": FORMAT,
    }
    pack(**arguments)
    with pytest.raises(ValueError, match=message):
        pack(**(arguments | change))


def test_a_tensor_is_a_pytree_with_a_static_layout():
    tensor = Plain.random(FORMAT, 64, 4, "float16").pack(FORMAT)
    leaves, structure = jax.tree.flatten(tensor)
    assert [leaf.dtype for leaf in leaves] == [jnp.uint16, jnp.uint32]
    again = jax.tree.unflatten(structure, leaves)
    assert (again.format, again.channels, again.scale_dtype) == (FORMAT, 64, "float16")
    shape = jax.eval_shape(lambda tensor: tensor, tensor)
    assert shape.shape == (64, 4)


@pytest.mark.parametrize("permuted", [False, True])
def test_concatenate_joins_output_channels(permuted):
    permutation = np.arange(64, dtype=np.int32)[::-1].copy() if permuted else None
    plains = [Plain.random(FORMAT, 64, outputs, "float16", outputs) for outputs in (3, 1, 8)]
    joined = concatenate([plain.pack(FORMAT, permutation) for plain in plains])
    whole = Plain(
        *(
            np.concatenate([getattr(plain, field.name) for plain in plains], axis=1)
            for field in dataclasses.fields(Plain)
        )
    ).pack(FORMAT, permutation)
    assert joined is not None
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
    assert (joined.format, joined.channels) == (whole.format, whole.channels)


def test_concatenate_of_one_is_itself():
    tensor = Plain.random(FORMAT, 64, 4, "float16").pack(FORMAT)
    jax.tree.map(np.testing.assert_array_equal, concatenate([tensor]), tensor)


@pytest.mark.parametrize(
    ("text", "channels", "dtype", "permutation"),
    [
        ("uint8:g32", 64, "float16", None),
        ("uint4:g64", 64, "float16", None),
        ("uint4:g32:sym", 64, "float16", None),
        ("uint4:g32", 96, "float16", None),
        ("uint4:g32", 64, "bfloat16", None),
        ("uint4:g32", 64, "float16", np.arange(64, dtype=np.int32)),
    ],
)
def test_concatenate_needs_one_layout(text, channels, dtype, permutation):
    first = Plain.random(FORMAT, 64, 4, "float16").pack(FORMAT)
    format = WeightFormat.parse(text)
    other = Plain.random(format, channels, 4, dtype).pack(format, permutation)
    assert concatenate([first, other]) is None
    assert concatenate([other, first]) is None


def test_concatenate_needs_one_permutation():
    plain = Plain.random(FORMAT, 64, 4, "float16")
    permutation = np.arange(64, dtype=np.int32)
    tensors = [plain.pack(FORMAT, order) for order in (permutation, permutation[::-1].copy())]
    assert concatenate(tensors) is None

"""Formats of weights, of activations and of products."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest

from mpjax.kernels import ActivationFormat, ProductFormat, WeightFormat, matmul, quantize
from tests.pallas_kernels.oracles import ALL_FORMATS

each_format = pytest.mark.parametrize("text", ALL_FORMATS)

CODES = ["uint4", "uint8", "table4", "table3", "table2", "float8", "float4", "int8", "liquid4"]
CODES += ["int4", "affine4", "affine8", "bfloat16", "float16"]


@each_format
def test_parse_inverts_str(text):
    assert str(WeightFormat.parse(text)) == text
    assert WeightFormat.parse(text) == WeightFormat.parse(str(WeightFormat.parse(text)))


def test_no_other_combination_is_legal():
    found = set()
    sizes, operands = (None, 0, 16, 32, 64, 128, 256, 512), (None, "int8", "float8", "float16")
    for fields in itertools.product(CODES, sizes, (False, True), operands):
        try:
            format = WeightFormat(*fields)
        except ValueError:
            continue
        found.add(str(format))
        assert WeightFormat.parse(str(format)) == format
        assert (format.codes, format.group_size, format.symmetric) == fields[:3]
        assert format.operand == fields[3] or fields[3] is None
    assert found == set(ALL_FORMATS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uint4", WeightFormat("uint4")),
        ("uint4:g32", WeightFormat("uint4", 32)),
        ("uint8:gK:sym", WeightFormat("uint8", None, True)),
        ("uint8:sym", WeightFormat("uint8", None, True)),
        ("table3:g256", WeightFormat("table3", 256)),
        ("float8", WeightFormat("float8")),
        ("float8:g128/float8", WeightFormat("float8", 128, operand="float8")),
        ("int8", WeightFormat("int8", operand="int8")),
        ("int8/int8", WeightFormat("int8")),
        ("liquid4:g64", WeightFormat("liquid4", 64, operand="int8")),
        ("bfloat16", WeightFormat("bfloat16")),
        ("float16", WeightFormat("float16")),
    ],
)
def test_parse(text, expected):
    assert WeightFormat.parse(text) == expected
    assert hash(WeightFormat.parse(text)) == hash(expected)


SIZES = "expected 32, 64, 128 or "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"can't read the weight format ''.*uint4:g128"),
        ("uint4:128", r"format 'uint4:128' \(did you mean 'uint4:g128'\?\): expected, for example"),
        ("UINT8-gK", r"format 'UINT8-gK' \(did you mean 'uint8:gK'\?\): expected, for example"),
        ("uint4:g128:sym:sym", "can't read"),
        ("uint4:sym:g128", "can't read"),
        ("uint4:g128/", "can't read"),
        ("uint4:g-1", "can't read"),
        (
            "unt4",
            r"unknown weight format 'unt4' \(did you mean 'uint4'\?\): expected one of uint4",
        ),
        ("int4", "int4 with group size K: expected 128$"),
        ("uint2:g64", "unknown weight format 'uint2'.*liquid4, bfloat16, float16"),
        ("uint4:g16", rf"uint4 with group size 16: {SIZES}K, all input channels"),
        ("uint8:g0", rf"uint8 with group size 0: {SIZES}K, all input channels"),
        ("uint4:g256", rf"uint4 with group size 256: {SIZES}K, all input channels"),
        ("table4", "table4 with group size K: expected 32, 64, 128 or 256"),
        ("table2:g512", "table2 with group size 512: expected 32, 64, 128 or 256"),
        ("float8:g64", r"float8 with group size 64: expected 128 or K, all input channels"),
        ("int8:g128", r"int8 with group size 128: expected K, all input channels"),
        ("liquid4", "liquid4 with group size K: expected 64$"),
        ("affine4", "affine4 with group size K: expected 32, 64 or 128$"),
        ("affine4:g32:sym", "affine4 has no zero point"),
        ("bfloat16:g128", r"bfloat16 with group size 128: expected K, all input channels"),
        ("float16:sym", "float16 has no zero point, so that it can't be symmetric"),
        ("table4:g64:sym", "table4 has no zero point"),
        ("liquid4:g64:sym", "liquid4 has no zero point"),
        ("int8:sym", "int8 has no zero point"),
        ("uint4:g128/int8", r"uint4 with the operand 'int8': expected none \(16 bits\)"),
        ("float8:gK/int8", r"float8 with the operand 'int8': expected none \(16 bits\) or float8"),
        ("int8/float8", "int8 with the operand 'float8': expected int8"),
        ("liquid4:g64/float8", "liquid4 with the operand 'float8': expected int8"),
        ("bfloat16/int8", r"bfloat16 with the operand 'int8': expected none \(16 bits\)"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        WeightFormat.parse(text)


@pytest.mark.parametrize(
    ("text", "word_bits", "columns", "planes", "plane_width"),
    [
        # As wide as a group, and at most a cache line: 64 words.
        ("uint4:g32", 16, 1, 4, 32),
        ("uint4:g128", 16, 1, 4, 64),
        ("uint4:gK", 16, 1, 4, 64),
        ("uint8:g32", 16, 1, 2, 32),
        ("uint8:gK", 16, 1, 2, 64),
        ("table4:g256", 16, 1, 4, 64),
        ("table2:g32", 16, 1, 8, 32),
        ("table2:g256", 16, 1, 8, 64),
        # Sixteen codes of three bits in three words; blocks of 512 channels.
        ("table3:g32", 16, 3, 16, 32),
        ("table3:g256", 16, 3, 16, 32),
        # Words as wide as the operand that they become.
        ("float8:g128", 16, 1, 2, 64),
        ("float8:gK", 16, 1, 2, 64),
        ("liquid4:g64", 8, 1, 2, 64),
        ("float8:g128/float8", 8, 1, 1, 128),
        ("int8/int8", 8, 1, 1, 128),
        ("bfloat16", 16, 1, 1, 64),
    ],
)
def test_layout(text, word_bits, columns, planes, plane_width):
    format = WeightFormat.parse(text)
    assert (format.word_bits, format.columns) == (word_bits, columns)
    assert (format.planes, format.plane_width) == (planes, plane_width)
    assert format.block == planes * plane_width
    assert format.is_flat == (planes == 1)


ACTIVATIONS = ("16-bit", "int8", "int8:g128", "float8", "float8:g128")
# The format of activations beside weights that are not multiplied in 16 bits.
EIGHT_BITS = {
    "int8:gK/int8": "int8",
    "liquid4:g64/int8": "int8",
    "int4:g128/int8": "int8:g128",
    "float8:gK/float8": "float8",
    "float8:g128/float8": "float8:g128",
}


def test_every_activation_format_reads_what_it_writes():
    found = set()
    for fields in itertools.product((None, "int8", "float8", "int4"), (None, 0, 64, 128)):
        try:
            format = ActivationFormat(*fields)
        except ValueError:
            continue
        found.add(str(format))
        assert ActivationFormat.parse(str(format)) == ActivationFormat.of(format) == format
        assert hash(format) == hash(ActivationFormat(*fields))
    assert found == set(ACTIVATIONS)
    assert ActivationFormat.parse(" FLOAT8:gK\n") == ActivationFormat("float8")
    assert str(ActivationFormat()) == "16-bit"


@pytest.mark.parametrize("text", ["", "int4", "int8:", "int8:g-1", "16", "uint4:g128", "int8/int8"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"can't read the format of activations .*: expected 16"):
        ActivationFormat.parse(text)


@pytest.mark.parametrize("text", ALL_FORMATS)
def test_a_weight_says_what_meets_it_by_default(text):
    """And the product is written as the weight is."""
    product = ProductFormat.of(text)
    assert str(product) == text
    assert product.weight == WeightFormat.parse(text)
    assert str(product.activations) == EIGHT_BITS.get(text, "16-bit")
    assert product == ProductFormat.of(product.weight) == ProductFormat.of(product)
    assert product == ProductFormat.of(text, product.activations)
    for format in (product, product.weight, product.activations):
        assert ActivationFormat.of(format) == product.activations
    for activations in ACTIVATIONS:
        if activations != str(product.activations):
            message = f"{text} multiplies activations in {product.activations}, not in "
            with pytest.raises(ValueError, match=message + activations):
                ProductFormat.of(text, activations)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, text) for text in ACTIVATIONS),
        ("float8:gK", "float8"),  # the activation format of this name, rather than the weight's
        ("int8/int8", "int8"),
        ("float8:g128/float8", "float8:g128"),
        ("liquid4:g64", "int8"),
        ("uint4:g128", "16-bit"),
    ],
)
def test_activations_of_a_text(text, expected):
    assert str(ActivationFormat.of(text)) == expected


def test_a_product_takes_the_activations_that_its_weight_can_meet(rng):
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.float32)
    weight = quantize(jnp.asarray(rng.standard_normal((128, 16)), jnp.float32), "int8")
    expected = matmul(x, weight)
    for activations in ("int8", ActivationFormat("int8")):
        assert (matmul(x, weight, activations=activations) == expected).all()
    with pytest.raises(ValueError, match="int8:gK/int8 multiplies activations in int8, not in 16"):
        matmul(x, weight, activations="16-bit")
    with pytest.raises(ValueError, match="there are activations, but the weight is a plain array"):
        matmul(x, weight.dequantize(), activations="16-bit")

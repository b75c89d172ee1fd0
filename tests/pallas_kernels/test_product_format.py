from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest

from mpjax.kernels import ActivationFormat, ProductFormat, WeightFormat, matmul, quantize
from tests.pallas_kernels.oracles import ALL_FORMATS

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("int8", 64), "values are 'int8' and whose group_size is 64: expected those of 16-bit"),
        (("float8", 64), "values are 'float8' and whose group_size is 64: .* or float8:g128"),
        ((None, 128), "values are None and whose group_size is 128"),
        (("int4",), "values are 'int4' and whose group_size is None"),
        ((8,), "values are 8 and"),
        (([],), r"values are \[\] and"),
        (("float8", "128"), "whose group_size is '128'"),
        (("float8", 128.0), r"whose group_size is 128\.0"),
        (("float8", True), "whose group_size is True"),
    ],
)
def test_fields_that_no_activations_have(fields, message):
    with pytest.raises(ValueError, match=message):
        ActivationFormat(*fields)


def test_codes_and_scales_of_activations():
    per_row, in_groups = ActivationFormat("float8"), ActivationFormat("float8", 128)
    assert per_row.dtype == in_groups.dtype == jnp.float8_e4m3fn
    assert ActivationFormat("int8").dtype == jnp.int8
    assert (per_row.groups(300), in_groups.groups(300)) == (1, 3)
    assert per_row.scales_rows
    assert not in_groups.scales_rows
    assert not ActivationFormat().scales_rows
    with pytest.raises(ValueError, match="activations in 16 bits keep their dtype"):
        _ = ActivationFormat().dtype


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


def test_what_names_no_activations_is_refused():
    with pytest.raises(ValueError, match="can't read the format of activations 'uint5'"):
        ActivationFormat.of("uint5")
    with pytest.raises(ValueError, match="the format of activations is 3: expected a text"):
        ActivationFormat.of(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the weight's format is 'int8': expected a WeightFormat"):
        ProductFormat("int8", ActivationFormat("int8"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activations' format is None: expected a ActivationFor"):
        ProductFormat(WeightFormat("int8"), None)  # type: ignore[arg-type]


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

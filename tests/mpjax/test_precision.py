from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.precision import Precision, describe_weights
from pallas_kernels import KVFormat, WeightFormat

packed_formats = st.builds(
    WeightFormat,
    st.sampled_from(["uint4", "uint8"]),
    st.sampled_from([32, 64, 128, None]),
    st.booleans(),
)
precisions = st.builds(
    Precision,
    st.one_of(st.none(), st.just(WeightFormat("bfloat16")), packed_formats),
    st.just(16),
    st.sampled_from([KVFormat(16), KVFormat(8), KVFormat(4)]),
)


@pytest.mark.parametrize(
    ("text", "weights", "kv_bits"),
    [
        ("W4A16KV8", WeightFormat("uint4", 128), 8),
        ("W8A16KV4", WeightFormat("uint8", 128), 4),
        ("W4g32A16KV8", WeightFormat("uint4", 32), 8),
        ("W4gKsymA16KV16", WeightFormat("uint4", None, True), 16),
        ("W8symA16KV16", WeightFormat("uint8", 128, True), 16),
        ("W16A16KV16", WeightFormat("bfloat16"), 16),
        ("A16KV8", None, 8),
    ],
)
def test_parse(text, weights, kv_bits):
    precision = Precision.parse(text)
    assert precision == Precision(weights, 16, KVFormat(kv_bits))
    assert str(precision) == text


def test_the_default_group_size_can_be_written():
    assert Precision.parse("W4g128A16KV16") == Precision.parse("W4A16KV16")


@given(precisions)
def test_parse_inverts_str(precision):
    assert Precision.parse(str(precision)) == precision


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("W4", "can't read the precision 'W4': expected W"),
        ("w4a16kv8", "can't read the precision"),
        ("W4A16KV8 ", "can't read the precision"),
        ("", "can't read the precision ''"),
        ("W4A8KV4", r"'W4A8KV4': activations of 8 bits \(A8\) are not implemented yet: only A16"),
        ("W3A16KV8", "W3 is not implemented: weights can be W16, W8 or W4"),
        ("W4g48A16KV8", "group size 48: expected one of"),
        ("W16g32A16KV8", "16-bit weights take no group size"),
        ("W16symA16KV8", "16-bit weights take no group size and no sym"),
        ("W4A16KV2", "KV2 is not a KV format: expected KV16, KV8 or KV4"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        Precision.parse(text)


def test_describe_weights():
    assert describe_weights(WeightFormat("float16")) == "W16"
    assert describe_weights(WeightFormat("uint8", None)) == "W8gK"

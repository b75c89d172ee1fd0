from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.kernels import KVFormat, WeightFormat
from mpjax.precision import Precision, describe_weights

packed_formats = st.one_of(
    st.builds(
        WeightFormat,
        st.sampled_from(["uint4", "uint8"]),
        st.sampled_from([32, 64, 128, None]),
        st.booleans(),
    ),
    st.builds(
        WeightFormat,
        st.sampled_from(["table4", "table3", "table2"]),
        st.sampled_from([32, 64, 128, 256]),
    ),
    st.builds(
        WeightFormat,
        st.just("float8"),
        st.sampled_from([128, None]),
        st.just(False),
        st.sampled_from([None, "float8"]),
    ),
    st.sampled_from([WeightFormat("int8"), WeightFormat("liquid4", 64)]),
)
precisions = st.builds(
    Precision,
    st.one_of(st.none(), st.just(WeightFormat("bfloat16")), packed_formats),
    st.one_of(
        st.builds(KVFormat, *[st.sampled_from([16, 8, 4, "fp8"])] * 2),
        st.builds(KVFormat, st.sampled_from(["4c", 2, "2t", "2g32"]), st.sampled_from([16, 4, 2])),
    ),
)


@pytest.mark.parametrize(
    ("text", "weights", "kv"),
    [
        ("W4A16KV8", WeightFormat("uint4", 128), 8),
        ("W8A16KV4", WeightFormat("uint8", 128), 4),
        ("W4g32A16KV8", WeightFormat("uint4", 32), 8),
        ("W4gKsymA16KV16", WeightFormat("uint4", None, True), 16),
        ("W8symA16KV16", WeightFormat("uint8", 128, True), 16),
        ("W16A16KV16", WeightFormat("bfloat16"), 16),
        ("WNF4A16KV8", WeightFormat("table4", 64), 8),
        ("WNF3g128A16KV8", WeightFormat("table3", 128), 8),
        ("WFP8A16KV8", WeightFormat("float8", 128), 8),
        ("WFP8AFP8KV8", WeightFormat("float8", None, False, "float8"), 8),
        ("WFP8g128AFP8KV8", WeightFormat("float8", 128, False, "float8"), 8),
        ("W8A8KV8", WeightFormat("int8"), 8),
        ("W4A8KV4", WeightFormat("liquid4", 64), 4),
        ("A16KV8", None, 8),
        ("W4A16KVfp8", WeightFormat("uint4", 128), "fp8"),
        ("WFP8AFP8K8V4", WeightFormat("float8", None, False, "float8"), (8, 4)),
        ("A16Kfp8V4", None, ("fp8", 4)),
        ("W16A16KV2", WeightFormat("bfloat16"), 2),
        ("W4A16KV4cg32", WeightFormat("uint4", 128), "4cg32"),
        ("A16K4cV2", None, ("4c", 2)),
    ],
)
def test_parse(text, weights, kv):
    precision = Precision.parse(text)
    assert precision == Precision(weights, KVFormat(*kv) if isinstance(kv, tuple) else KVFormat(kv))
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
        ("W4A4KV4", "'W4A4KV4': A4 is not implemented: activations can be A16, A8 or AFP8"),
        ("W3A16KV8", "W3A16 is not implemented: there are W16A16, W8A16"),
        ("W16A8KV8", "W16A8 is not implemented"),
        ("A8KV8", "A8 needs a W part"),
        ("W4g48A16KV8", "group size 48: expected 32 or 64 or 128 or K"),
        ("W4g128A8KV8", "liquid4 with group size 128: expected 64"),
        ("WNF4symA16KV8", "table4 has no zero point"),
        ("W16g32A16KV8", "16-bit weights take no group size"),
        ("W16symA16KV8", "16-bit weights take no group size and no sym"),
        ("W4A16KV3", "KV3 is not a KV format: expected KV16, KV8, KV8s, KV4"),
        ("W4A16K8V", "can't read the precision"),
        ("W4A16KxV8", "can't read the KV format 'KxV8'"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        Precision.parse(text)


def test_describe_weights():
    assert describe_weights(WeightFormat("float16")) == "W16"
    assert describe_weights(WeightFormat("uint8", None)) == "W8gK"

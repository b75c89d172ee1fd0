from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.kernels import QuantizedTensor, WeightFormat, pack, quantize, unpack
from mpjax.kernels.codes.table import normal_float
from mpjax.kernels.quantize import quantize_like, why_out_of_range
from tests.pallas_kernels.oracles import PACKED_FORMATS, WEIGHT_FORMATS, most_formats, wide
from tests.pallas_kernels.quantizers import oracle

INTEGER_FORMATS = [text + suffix for text in WEIGHT_FORMATS for suffix in ("", ":sym")]
# One of every kind of codes and of parameters, by what scales are stored in.
IN_FLOAT16 = ["uint4:g32", "uint8:gK:sym", "table4:g64", "table3:g32", "table2:g256"]
IN_FLOAT32 = ["float8:gK", "float8:g128", "float8:g128/float8", "int8:gK/int8", "liquid4:g64/int8"]
KINDS = [*IN_FLOAT16, *IN_FLOAT32]
each_format = pytest.mark.parametrize("text", most_formats(PACKED_FORMATS))
each_kind = pytest.mark.parametrize("text", KINDS)

quick_quantize = jax.jit(quantize, static_argnames="format")


@jax.jit
def dequantize(tensor: QuantizedTensor) -> jax.Array:
    return tensor.dequantize()


def round_trip(
    weight: np.ndarray, format: WeightFormat, table: np.ndarray | None = None
) -> np.ndarray:
    return np.asarray(dequantize(quick_quantize(weight, format, table=table)))


def random_weight(seed: int, channels: int = 256, outputs: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    magnitude = 10 ** rng.uniform(-6, 1, outputs)  # from float16's subnormals on
    return (rng.standard_normal((channels, outputs)) * magnitude).astype(np.float32)


def assert_equals_oracle(
    tensor: QuantizedTensor, weight: np.ndarray, table: np.ndarray | None = None
) -> None:
    expected = oracle(weight, tensor.format, table)
    found = unpack(tensor)
    for actual, array in ((found.codes, expected.codes), (found.scales, expected.scales)):
        np.testing.assert_array_equal(
            np.asarray(actual).astype(np.float32), array.astype(np.float32)
        )
    zeros = tensor.zeros()[: len(expected.zeros)] if found.zeros is None else found.zeros
    np.testing.assert_array_equal(zeros, expected.zeros.astype(np.float32))
    if expected.channel_scales is None:
        assert tensor.channel_scales is None
    else:
        np.testing.assert_array_equal(tensor.channel_scales, expected.channel_scales)
    if tensor.format.codes.startswith("table"):
        entries = normal_float(tensor.format.bits) if table is None else table
        np.testing.assert_array_equal(tensor.table, entries)
    else:
        assert tensor.table is None


@each_format
def test_equals_the_oracle(text):
    weight = random_weight(len(text))
    of_one_sign = np.abs(weight) + np.float32(0.1)
    for each in (weight, of_one_sign, -of_one_sign):
        assert_equals_oracle(quick_quantize(each, WeightFormat.parse(text)), each)


@pytest.mark.parametrize("activations", ["", "/float8"])
@pytest.mark.parametrize(("outputs", "channels"), [(1, 384), (128, 300), (300, 384), (300, 257)])
def test_blocks_of_float8_are_ragged_at_the_end(activations, outputs, channels):
    weight = random_weight(outputs, channels, outputs)
    weight[:128, :128] = 0
    tensor = quick_quantize(weight, WeightFormat.parse(f"float8:g128{activations}"))
    assert_equals_oracle(tensor, weight)
    scales = np.asarray(tensor.scales())
    assert scales.shape == (3, outputs)
    for first in range(0, outputs, 128):
        block = scales[:, first : first + 128]
        np.testing.assert_array_equal(block, np.repeat(block[:, :1], block.shape[1], axis=1))
    assert (scales[0, :128] == 1).all()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    text=st.sampled_from(INTEGER_FORMATS),
    outlier=st.sampled_from([0.0, 30.0, -30.0]),
)
def test_an_integer_is_off_by_half_a_step_at_most(seed, text, outlier):
    format = WeightFormat.parse(text)
    weight = random_weight(seed)
    weight[7] += outlier * np.abs(weight).max(0)
    tensor = quick_quantize(weight, format)
    scales = wide(tensor.scales())[: format.groups(256)]
    # Rounding the scale down to float16 shortens the range that the codes reach.
    spacing = np.spacing(scales.astype(np.float16)).astype(np.float64)
    allowed = 0.5 * scales + (2**format.bits - 1) * spacing / 2
    error = np.abs(wide(dequantize(tensor)) - weight).reshape(len(scales), -1, 12).max(1)
    assert (error <= allowed * (1 + 1e-6)).all()


@each_kind
def test_zeros_stay_zero(text):
    format = WeightFormat.parse(text)
    weight = random_weight(3)
    weight[:128, :5] = 0
    weight[:, 5:7] = 0
    dequantized = round_trip(weight, format)
    assert np.isfinite(dequantized).all()
    zero = weight == 0
    if format.codes == "liquid4":
        zero[:, :5] = False  # of the channels with other groups, the range of one may miss zero
    np.testing.assert_array_equal(dequantized[zero], 0)


@each_kind
@pytest.mark.parametrize("peak", [1e-30, 1e-36, 3e-37, 1e-37, 1e-38])
def test_values_whose_scale_underflows_become_zeros(text, peak):
    """A channel that training has let die may hold such values beside zeros."""
    weight = np.zeros((256, 12), np.float32)
    weight[5], weight[70] = peak, -peak / 3
    np.testing.assert_allclose(round_trip(weight, WeightFormat.parse(text)), 0, atol=peak * 1.01)


@pytest.mark.gpu
@each_kind
def test_subnormal_scales_divide_nothing_on_a_gpu(text):
    """A GPU has subnormal numbers, whose reciprocals are infinite."""
    for peak in (1e-36, 1e-37, 1e-38, 1e-40, 1e-44):
        weight = np.zeros((256, 3), np.float32)
        weight[5], weight[70] = peak, -peak / 3
        tensor = quick_quantize(jnp.asarray(weight), WeightFormat.parse(text))
        np.testing.assert_allclose(dequantize(tensor), 0, atol=peak * 1.01)


# Unsymmetric, and without an entry that is zero.
TABLES = {
    2: [-2.0, -0.25, 0.25, 1.0],
    3: [-1.0, -0.75, -0.5, -0.125, 0.125, 0.5, 1.5, 3.0],
    4: np.linspace(-1, 1, 16) ** 3,
}


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_table_of_ones_own(bits):
    table = np.array(TABLES[bits], np.float32)
    format = WeightFormat.parse(f"table{bits}:g32")
    weight = random_weight(bits)
    weight[32:64], weight[64:96] = 0, 1e-9
    tensor = quick_quantize(weight, format, table=table)
    assert_equals_oracle(tensor, weight, table)
    dequantized = np.asarray(dequantize(tensor))
    np.testing.assert_array_equal(dequantized[32:96], 0)
    # No other entry is nearer, but for the rounding of the middles.
    scales = np.repeat(wide(tensor.scales())[:8], 32, axis=0)
    best = np.abs(wide(table) * scales[..., None] - wide(weight)[..., None]).min(-1)
    assert (np.abs(wide(dequantized) - weight) <= best + 1e-6 * scales).all()


@pytest.mark.parametrize(
    ("shape", "text", "table", "message"),
    [
        ((64,), "uint4:g32", None, r"shape is \(64,\); uint4:g32 is the format of a matrix"),
        ((2, 0, 4), "int8", None, r"shape is \(2, 0, 4\); int8:gK/int8 is"),
        ((2, 48, 4), "uint8:g32", None, "48 input channels can't be split into groups of 32"),
        ((0, 4), "uint4:gK", None, r"shape is \(0, 4\); uint4:gK is the format of a matrix"),
        ((64, 0), "float8:gK", None, r"shape is \(64, 0\); float8:gK is the format of a matrix"),
        ((100, 4), "uint4:g32", None, "100 input channels can't be split into groups of 32"),
        ((96, 4), "liquid4:g64", None, "96 input channels can't be split into groups of 64"),
        ((192, 4), "table2:g128", None, "192 input channels can't be split into groups of 128"),
        ((64, 4), "uint4:g32", 16, "uint4:g32 has no table"),
        ((64, 4), "bfloat16", 16, "bfloat16 has no table"),
        ((64, 4), "table4:g32", 8, r"table has shape \(8,\); table4:g32 expects \(16,\)"),
    ],
)
def test_refuses(shape, text, table, message):
    entries = None if table is None else jnp.linspace(-1, 1, table)
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones(shape), WeightFormat.parse(text), table=entries)


@pytest.mark.gpu
@each_kind
def test_the_gpu_computes_the_same_but_for_ties(text):
    """XLA's division on the GPU may be off in the last place."""
    weight, format = random_weight(6, 512, 100), WeightFormat.parse(text)
    tensor = quantize(jnp.asarray(weight), format)
    expected = oracle(weight, format)
    scales = wide(tensor.scales())[: len(expected.scales)]
    zeros = wide(tensor.zeros())[: len(expected.zeros)]
    codes = wide(unpack(tensor).codes)
    np.testing.assert_allclose(scales, wide(expected.scales), rtol=2e-7)
    for one, other in ((codes, wide(expected.codes)), (zeros, wide(expected.zeros))):
        assert (np.abs(one - other) <= np.maximum(1, np.abs(other) / 8)).all()
        assert (one != other).mean() < 2e-3


@pytest.mark.gpu
@each_format
def test_the_gpu_dequantizes_as_the_cpu_does(text):
    """In one program, with as many outputs as gpt-oss' down projection and about its channels."""
    format = WeightFormat.parse(text)
    channels = 2880 - 2880 % (format.group_size or 1)
    tensor = quick_quantize(random_weight(7, channels, 2880), format)
    expected = dequantize(jax.device_put(tensor, jax.devices("cpu")[0]))
    np.testing.assert_allclose(dequantize(tensor), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "values", [[0, 0, 1, 2], [1, 0, 2, 3], [0, 1, 2, np.nan], [0, 1, 2, np.inf]]
)
def test_tables_that_nothing_can_be_looked_up_in_are_refused(values):
    with pytest.raises(ValueError, match="expected finite values that ascend"):
        quantize(jnp.ones((64, 8)), WeightFormat.parse("table2:g64"), table=jnp.asarray(values))


@each_kind
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(value, text):
    """The matrix is so large that maxima pass over NaN on a CPU."""
    weight = random_weight(2, 512, 128)
    weight[3, 5:7] = value
    message = "quantize: 2 of the 65536 weights are NaN or infinite: expected numbers"
    with pytest.raises(ValueError, match=message):
        quantize(jnp.asarray(weight), text)
    jax.eval_shape(lambda weight: quantize(weight, text), weight)  # not known


@pytest.mark.parametrize(
    ("text", "factor", "too"),
    [(text, 1e9, "large") for text in [*IN_FLOAT16, "float16"]]
    + [(text, 1e-9, "small") for text in [*IN_FLOAT16, "float16"]]
    + [(text, 1e-37, "small") for text in IN_FLOAT32],
)
def test_what_scales_cannot_hold_is_refused(factor, too, text):
    weight = np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32)
    quantize(weight, text)
    quantize(weight * 0, text)
    message = rf"largest magnitude .* is .*e[+-]\d+, too {too} for {text}.*, whose range is that of"
    with pytest.raises(ValueError, match=message):
        quantize(weight * factor, text)
    weight[0] = factor  # small beside others is zero; and large is large
    if too == "small":
        quantize(weight, text)


@pytest.mark.parametrize("has_one_sign", [False, True])  # and a smaller scale of such groups
@pytest.mark.parametrize("text", ["uint4:g32", "uint8:gK", "uint8:g128:sym", "table2:g256"])
def test_the_smallest_weights_keep_their_precision(text, has_one_sign):
    """Where they are refused, and not before, rounding of scales is what counts."""
    weight = np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32)
    weight = np.full_like(weight, 255 * 1.056) if has_one_sign else weight

    def packed(power):
        return quick_quantize(weight * 2.0**power, WeightFormat.parse(text))

    def error(power):
        dense = np.asarray(dequantize(packed(power))) / 2.0**power
        return np.abs(dense - weight).mean() / np.abs(weight).mean()

    powers = range(0, -60, -1)
    refused = next(p for p in powers if why_out_of_range(weight * 2.0**p, packed(p)))
    assert error(refused + 1) < error(0) + 0.03


@each_kind
def test_quantizing_like_a_tensor(text):
    """Other weights get what `quantize` gives them; with its scales, a tensor stays as it is."""
    old, new = (quick_quantize(random_weight(seed), WeightFormat.parse(text)) for seed in (1, 2))
    found = quantize_like(jnp.asarray(random_weight(2)), old)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    kept = quantize_like(dequantize(old), old, keep_scales=True)
    np.testing.assert_array_equal(dequantize(kept), dequantize(old))
    with pytest.raises(ValueError, match=r"weight has shape \(3, 12\), and the tensor \(256, 12\)"):
        quantize_like(jnp.ones((3, 12)), old)


def test_quantizing_like_a_permuted_tensor(rng):
    weight = random_weight(1)
    order = jnp.asarray(rng.permutation(256))
    old = quick_quantize(weight[order], WeightFormat.parse("uint4:g64"))
    old = dataclasses.replace(old, permutation=order)
    found = quantize_like(jnp.asarray(weight), old)
    np.testing.assert_array_equal(dequantize(found), dequantize(old))
    bfloat = pack(dataclasses.replace(unpack(old), scales=unpack(old).scales.astype(jnp.bfloat16)))
    found = quantize_like(jnp.asarray(weight), bfloat)
    assert jax.tree.structure(found) == jax.tree.structure(bfloat)
    scales = np.abs(np.asarray(bfloat.scales(), np.float32)).repeat(64, 0)[np.argsort(order)]
    assert (np.abs(np.asarray(dequantize(found)) - weight) <= 1.1 * scales).all()

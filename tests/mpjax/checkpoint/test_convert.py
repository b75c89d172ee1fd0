from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint import convert
from mpjax.checkpoint.convert import (
    PIECE_BYTES,
    convert_array,
    convert_experts,
    convert_linear,
)
from mpjax.checkpoint.plan import LinearSource
from mpjax.checkpoint.safetensors import TensorInfo
from mpjax.checkpoint.schemes.awq import AWQReader
from mpjax.checkpoint.schemes.gptq import GPTQReader
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from mpjax.models import ExpertPlace, LinearPlace
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq

SHAPE, SIZE = (64, 32), 32
AWQ = AWQReader(SIZE)
GPTQ = GPTQReader(4, SIZE)
UINT4 = WeightFormat("uint4", SIZE)


class Files:
    """Tensors by name, and a `read` that hands them out."""

    def __init__(self):
        self.arrays = {}

    def add(self, name, array):
        self.arrays[name] = array
        return TensorInfo(name, array.dtype, array.shape, Path("file"), 0, array.nbytes)

    def read(self, info):
        return self.arrays[info.name]

    def source(self, name, tensors, reader=None, format=None, shape=SHAPE):
        infos = {suffix: self.add(f"{name}.{suffix}", a) for suffix, a in tensors.items()}
        return LinearSource(name, shape, infos, reader, format)


def place(*names, bias=False):
    return LinearPlace("path", names, (SHAPE,) * len(names), bias)


def kernel_of(part) -> Any:
    return part.kernel.get_value()


def random_codes(rng, scale_dtype: Any = np.float16) -> Any:
    codes = rng.integers(0, 16, SHAPE, np.uint8)
    zeros = rng.integers(0, 16, (SHAPE[0] // SIZE, SHAPE[1]), np.uint8)
    scales = (rng.integers(1, 100, zeros.shape) / 64).astype(scale_dtype)
    return codes, scales, zeros


def dequantized(codes, scales, zeros, g_idx=None):
    g_idx = np.arange(SHAPE[0]) // SIZE if g_idx is None else g_idx
    return (codes.astype(np.float64) - zeros[g_idx]) * scales[g_idx].astype(np.float64)


def in_groups(function, module, g_idx):
    codes, scales, zeros = module
    return function(codes, scales, zeros, g_idx)


@pytest.mark.parametrize(("pack_module", "packing"), [(pack_awq, AWQ), (pack_gptq, GPTQ)])
def test_zero_points_that_are_all_the_middle_make_it_symmetric(pack_module, packing, rng):
    files, modules = Files(), [random_codes(rng) for _ in range(2)]
    modules = [(codes, scales, np.full_like(zeros, 8)) for codes, scales, zeros in modules]
    sources = [
        files.source(name, pack_module(*module), packing, UINT4)
        for name, module in zip("ab", modules, strict=True)
    ]
    [part] = convert_linear(place("a", "b"), sources, "bfloat16", files.read)
    assert kernel_of(part).format == WeightFormat("uint4", SIZE, symmetric=True)
    expected = np.concatenate([dequantized(*module) for module in modules], 1)
    np.testing.assert_array_equal(kernel_of(part).dequantize(), expected)

    modules[1][2][1, 3] = 7
    sources[1] = files.source("c", pack_module(*modules[1]), packing, UINT4)
    [part] = convert_linear(place("a", "c"), sources, "bfloat16", files.read)
    assert kernel_of(part).format == UINT4  # one of them is not
    expected = np.concatenate([dequantized(*module) for module in modules], 1)
    np.testing.assert_array_equal(kernel_of(part).dequantize(), expected)


@pytest.mark.parametrize("exact", ["float16", "bfloat16"])
def test_float32_scales_are_narrowed_where_that_is_exact(exact, rng):
    codes, scales, zeros = random_codes(rng, np.float32)
    if exact == "bfloat16":
        scales = scales * np.float32(2.0**-40)  # below float16's range
        scales = scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    files = Files()
    source = files.source("a", pack_awq(codes, scales, zeros), AWQ, UINT4)
    [part] = convert_linear(place("a"), [source], "bfloat16", files.read)
    assert kernel_of(part).scale_dtype == exact
    expected = dequantized(codes, scales, zeros)
    np.testing.assert_array_equal(kernel_of(part).dequantize(), expected)


def expect(message, source, files, dtype="bfloat16", bias=False):
    with pytest.raises(CheckpointError, match=message) as caught:
        convert_linear(place("a", bias=bias), [source], dtype, files.read)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factor", "dtype", "most"), [(1, "float16", 2**-11), (2.0**-20, "bfloat16", 2**-8)]
)
def test_float32_scales_are_rounded_to_the_better_of_16_bits(factor, dtype, most, rng):
    codes, scales, zeros = random_codes(rng, np.float32)
    scales = (scales * factor * 1.1).astype(np.float32)
    files = Files()
    source = files.source("a", pack_awq(codes, scales, zeros), AWQ, UINT4)
    message = rf"scales in float32 are rounded to {dtype}, in which W4g32 keeps them: by 0\."
    with pytest.warns(UserWarning, match=message):
        [part] = convert_linear(place("a"), [source], "bfloat16", files.read)
    assert kernel_of(part).scale_dtype == dtype
    expected = dequantized(codes, scales, zeros)
    error = abs(kernel_of(part).dequantize() - expected) / np.maximum(abs(expected), 2.0**-126)
    assert 0 < error.max() <= most


SMALL_SCALE = 1.3e-6  # below float16's normal numbers


def sources_with_a_small_scale(files, rng):
    """Two maps with float32 scales; those of the first alone would be float16."""
    modules = [random_codes(rng, np.float32) for _ in range(2)]
    modules[1][1][1, 2] = SMALL_SCALE
    sources = [
        files.source(name, pack_awq(*module), AWQ, UINT4)
        for name, module in zip("ab", modules, strict=True)
    ]
    return sources, [dequantized(*module) for module in modules]


@pytest.mark.filterwarnings("ignore:scales in float32 are rounded to bfloat16")
@pytest.mark.parametrize("piece", [0, PIECE_BYTES])
def test_float32_scales_of_experts_get_one_dtype(piece, rng, monkeypatch):
    """Also where experts come one by one."""
    monkeypatch.setattr(convert, "PIECE_BYTES", piece)
    files = Files()
    sources, expected = sources_with_a_small_scale(files, rng)
    experts = ExpertPlace("path", ("a", "b"), (SHAPE,) * 2, False, experts=2)
    stacks = [
        kernel_of(stack) for stack in convert_experts(experts, sources, "bfloat16", files.read)
    ]
    assert len(stacks) == (1 if piece else 2)
    assert {stack.scale_dtype for stack in stacks} == {"bfloat16"}
    found = np.concatenate([stack.dequantize() for stack in stacks])
    np.testing.assert_allclose(found, np.stack(expected), rtol=2**-8)


def test_scales_that_no_16_bits_hold_are_refused(rng):
    codes, scales, zeros = random_codes(rng, np.float32)
    scales[1, 2] = 3.4e38  # above bfloat16's largest number
    files = Files()
    source = files.source("a", pack_awq(codes, scales, zeros), AWQ, UINT4)
    expect(
        r"^a has float32 scales beyond the range of float16 and bfloat16, in which W4g32",
        source,
        files,
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("scale_dtype", [np.float16, np.float32])
def test_scales_that_are_not_finite_are_refused(value, scale_dtype, rng):
    codes, scales, zeros = random_codes(rng, scale_dtype)
    scales[1, 2] = value
    files = Files()
    source = files.source("a", pack_gptq(codes, scales, zeros), GPTQ, UINT4)
    expect("^a: 1 of the 64 scales are NaN or infinite", source, files)


@pytest.mark.parametrize(("factor", "too"), [(1e9, "large"), (1e-9, "small")])
def test_weights_beyond_the_range_of_scales_are_not_quantised(factor, too, rng):
    weight = (rng.standard_normal(SHAPE[::-1]) * factor).astype(ml_dtypes.bfloat16)
    files = Files()
    source = files.source("a", {"weight": weight}, format=UINT4)
    expect(rf"^a\.weight: the largest magnitude .* too {too} for uint4", source, files)


def test_one_nan_in_a_large_matrix_is_seen(rng):
    """In float32, where the CPU's maximum passes over it."""
    weight = rng.standard_normal((256, 128)).astype(np.float32)
    weight[3, 4] = np.nan
    files = Files()
    for format in (UINT4, None):
        source = files.source("a", {"weight": weight}, format=format, shape=weight.T.shape)
        message = (
            r"^a\.weight: 1 of the 32768 values are NaN or infinite: the checkpoint is damaged"
        )
        expect(message, source, files, "float32")


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_plain_values_that_are_not_finite_are_refused(value, dtype, rng):
    weight = rng.standard_normal(SHAPE[::-1]).astype(ml_dtypes.bfloat16)
    weight[1, 2] = 1e6  # too large for float16, and still the file is what is wrong
    weight[3, 4:7] = value
    files = Files()
    source = files.source("a", {"weight": weight})
    message = r"^a\.weight: 3 of the 2048 values are NaN or infinite: the checkpoint is damaged"
    expect(message, source, files, dtype)
    with pytest.raises(CheckpointError, match=message):
        convert_array(source.tensors["weight"], dtype, files.read)
    bias = np.zeros(SHAPE[1], ml_dtypes.bfloat16)
    bias[5] = value
    weight[:] = 0
    source = files.source("b", {"weight": weight, "bias": bias})
    expect(r"^b\.bias: 1 of the 32 values are NaN or infinite", source, files, dtype, bias=True)


def test_values_beyond_float16_are_refused(rng):
    weight = rng.standard_normal(SHAPE[::-1]).astype(ml_dtypes.bfloat16)
    weight[0, 0] = 1e6
    files = Files()
    source = files.source("a", {"weight": weight})
    expect(
        r"^a\.weight: 1 of 2048 values are beyond the range of float16", source, files, "float16"
    )
    with pytest.raises(CheckpointError, match=r"a\.weight: 1 of 2048 .* dtype='bfloat16'"):
        convert_array(source.tensors["weight"], "float16", files.read)
    assert convert_array(source.tensors["weight"], "float32", files.read).dtype == np.float32
    info = files.add("b", np.full(3, np.finfo(np.float32).max))
    with pytest.raises(CheckpointError, match=r"^b: 3 of 3 .* of bfloat16: .* dtype='float32'"):
        convert_array(info, "bfloat16", files.read)


def test_a_bias_without_a_place_must_be_zero(rng):
    files, module = Files(), random_codes(rng)
    bias = np.zeros(SHAPE[1], np.float16)
    source = files.source("a", pack_gptq(*module) | {"bias": bias}, GPTQ, UINT4)
    [part] = convert_linear(place("a"), [source], "bfloat16", files.read)
    assert part.bias is None
    bias[7] = 1
    expect(r"^a\.bias is not zero, but by config\.json the module has no bias", source, files)


def test_modules_of_one_shape_share_their_compilation(rng, caplog):
    def convert_all(name, weight, g_idx):
        files = Files()
        packed = in_groups(pack_gptq, random_codes(rng), g_idx)
        for source in (
            files.source(name, packed, GPTQ, UINT4),
            files.source(name, {"weight": weight}),
            files.source(name, {"weight": weight}, format=UINT4),
        ):
            convert_linear(place(name), [source], "bfloat16", files.read)

    def compiled():
        return [record for record in caplog.records if "XLA compilation" in record.message]

    weights = rng.standard_normal((3, *SHAPE[::-1])).astype(np.float32)
    orders = [rng.permutation(np.arange(SHAPE[0]) // SIZE) for _ in range(3)]
    with jax.log_compiles():
        convert_all("a", weights[0], orders[0])
        caplog.clear()
        for name, weight, g_idx in zip("bc", weights[1:], orders[1:], strict=True):
            convert_all(name, weight, g_idx)
        assert not compiled()
        jax.jit(lambda x: x + 1)(weights)
        assert len(compiled()) == 1


def test_shards_of_different_act_order_stay_apart(rng):
    files, modules = Files(), [random_codes(rng) for _ in range(2)]
    orders = [rng.permutation(np.arange(SHAPE[0]) // SIZE) for _ in range(2)]
    sources = [
        files.source(name, in_groups(pack_gptq, module, g_idx), GPTQ, UINT4)
        for name, module, g_idx in zip("ab", modules, orders, strict=True)
    ]
    parts = convert_linear(place("a", "b"), sources, "bfloat16", files.read)
    for part, module, g_idx in zip(parts, modules, orders, strict=True):
        expected = in_groups(dequantized, module, g_idx)
        np.testing.assert_array_equal(kernel_of(part).dequantize(), expected)

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint import fp8
from mpjax.checkpoint.fp8_config import FP8Config
from mpjax.errors import CheckpointError
from mpjax.kernels import pack

NAME = "model.layers.0.mlp.down_proj"
E4M3 = ml_dtypes.float8_e4m3fn
BLOCKS = FP8Config("fp8", (128, 128), "float8")
CHANNELS = FP8Config("compressed-tensors", (1, None), "float8")
TENSOR = FP8Config("compressed-tensors", (None, None), None)


def random_module(config, outputs=200, channels=256, scale_dtype=np.float32, seed=0):
    """Tensors of random bits: every byte is a code, but for the two NaNs."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (outputs, channels), np.uint8)
    codes[codes % 128 == 127] = 0
    rows, columns = config.block
    shape = (1,) if rows is None else (-(-outputs // rows), -(-channels // (columns or channels)))
    scales = rng.uniform(0.01, 0.1, shape).astype(scale_dtype)
    return {"weight": codes.view(E4M3), config.scale_name: scales}


def dequantized(tensors, config):
    """Element (k, n) is the code at (n, k), times the scale of the block that it is in."""
    codes, scales = tensors["weight"], tensors[config.scale_name]
    values = np.empty(codes.shape[::-1], np.float32)
    for n, k in np.ndindex(codes.shape):
        row = n // (config.block[0] or codes.shape[0])
        column = k // (config.block[1] or codes.shape[1])
        values[k, n] = np.float32(codes[n, k]) * np.float32(
            scales[row] if scales.ndim == 1 else scales[row, column]
        )
    return values


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(
    ("config", "channels"),
    [*((config, 256) for config in (BLOCKS, CHANNELS, TENSOR)), (BLOCKS, 200), (BLOCKS, 96)],
)
def test_the_packed_weight_equals_the_format_description(config, channels, scale_dtype):
    tensors = random_module(config, channels=channels, scale_dtype=scale_dtype)
    plain = fp8.decode(tensors, config, NAME)
    np.testing.assert_array_equal(plain.codes.view(np.uint8), tensors["weight"].view(np.uint8).T)
    assert plain.scales.dtype == np.float32
    packed = pack(plain)
    np.testing.assert_array_equal(packed.dequantize(), dequantized(tensors, config))


@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 300))
def test_every_output_channel_has_the_scale_of_its_block(outputs, channels, size):
    config = FP8Config("fp8", (size, 128), "float8")
    tensors = random_module(config, outputs, channels)
    scales = fp8.decode(tensors, config, NAME).scales
    rows = np.arange(outputs) // size
    np.testing.assert_array_equal(scales, tensors["weight_scale_inv"][rows].T)


def test_decode_inside_jit():
    tensors = random_module(BLOCKS)
    jitted = jax.jit(lambda arrays: fp8.decode(arrays, BLOCKS, NAME))(tensors)
    eager = fp8.decode(tensors, BLOCKS, NAME)
    jax.tree.map(np.testing.assert_array_equal, jitted, eager)


def test_matches():
    assert fp8.matches(random_module(BLOCKS))
    assert fp8.matches(random_module(CHANNELS))
    assert fp8.matches({"weight": np.zeros((2, 2), E4M3)})
    assert fp8.matches({"weight_scale": np.zeros((2, 1))})
    assert not fp8.matches({"weight": np.zeros((2, 2), np.float16), "scales": np.zeros((2, 2))})


@pytest.mark.parametrize(
    ("config", "suffix", "array", "message"),
    [
        (
            *(BLOCKS, "weight_scale_inv", np.zeros((3, 2), np.float32)),
            r"down_proj\.weight_scale_inv is float32 \[3, 2\]: expected float16 or bfloat16 or "
            r"float32 \[2, 2\]",
        ),
        (BLOCKS, "weight_scale_inv", np.zeros((2, 2), np.int8), r"weight_scale_inv is int8"),
        (BLOCKS, "weight", np.zeros((200, 256), np.float16), r"expected float8_e4m3fn \[200, 256"),
        (BLOCKS, "weight", np.zeros((200, 256), ml_dtypes.float8_e5m2), r"is float8_e5m2 \[200"),
        (BLOCKS, "weight", np.zeros((200, 384), E4M3), r"is float32 \[2, 2\]: expected .* \[2, 3"),
        (BLOCKS, "weight", np.zeros(200, E4M3), "no tensor weight that is a matrix"),
        (CHANNELS, "weight_scale", np.zeros(200, np.float32), r"expected .* \[200, 1\]"),
        (TENSOR, "weight_scale", np.zeros((200, 1), np.float32), r"expected .* \[1\]"),
    ],
)
def test_tensor_errors(config, suffix, array, message):
    with pytest.raises(CheckpointError, match=message):
        fp8.decode({**random_module(config), suffix: array}, config, NAME)


@pytest.mark.parametrize("config", [BLOCKS, CHANNELS])
def test_missing_tensors(config):
    for suffix in ("weight", config.scale_name):
        tensors = random_module(config)
        del tensors[suffix]
        with pytest.raises(CheckpointError, match=f"{NAME} has no tensor {suffix}"):
            fp8.decode(tensors, config, NAME)


def test_shape_that_the_model_expects():
    assert fp8.check(random_module(BLOCKS), BLOCKS, NAME, (256, 200)) == (256, 200)
    with pytest.raises(CheckpointError, match=r"256 input and 200 output.*expects 128 and 200"):
        fp8.decode(random_module(BLOCKS), BLOCKS, NAME, (128, 200))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_weights_that_are_not_numbers(byte):
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0
    fp8.check_codes(NAME, jnp.asarray(codes.view(E4M3)))
    codes[3] = byte
    with pytest.raises(CheckpointError, match=f"{NAME}.weight has weights that are NaN"):
        fp8.check_codes(NAME, jnp.asarray(codes.view(E4M3)))


def test_blocks_that_are_larger_than_any_matrix_take_no_memory():
    tensors = random_module(FP8Config("fp8", (10**12, 128), "float8"))
    scales = fp8.decode(tensors, FP8Config("fp8", (10**12, 128), "float8"), NAME).scales
    np.testing.assert_array_equal(scales, np.tile(tensors["weight_scale_inv"].T, (1, 200)))

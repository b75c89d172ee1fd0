from __future__ import annotations

import copy
import dataclasses
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, pack
from tests.mpjax.checkpoint.schemes.plain import random_plain
from tests.mpjax.checkpoint.write_checkpoint import CACHE, FP8, compressed_fp8

NAME = "model.layers.0.mlp.down_proj"
E4M3 = ml_dtypes.float8_e4m3fn
BLOCKS = FP8Scheme("fp8", (128, 128), "float8")
CHANNELS = FP8Scheme("compressed-tensors", (1, None), "float8")
TENSOR = FP8Scheme("compressed-tensors", (None, None), None)


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
    plain = config.decode(tensors, NAME)
    np.testing.assert_array_equal(plain.codes.view(np.uint8), tensors["weight"].view(np.uint8).T)
    assert plain.scales.dtype == np.float32
    packed = pack(plain)
    np.testing.assert_array_equal(packed.dequantize(), dequantized(tensors, config))


@settings(max_examples=15)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 300))
def test_every_output_channel_has_the_scale_of_its_block(outputs, channels, size):
    config = FP8Scheme("fp8", (size, 128), "float8")
    tensors = random_module(config, outputs, channels)
    scales = config.decode(tensors, NAME).scales
    rows = np.arange(outputs) // size
    np.testing.assert_array_equal(scales, tensors["weight_scale_inv"][rows].T)


def test_decode_inside_jit():
    tensors = random_module(BLOCKS)
    jitted = jax.jit(lambda arrays: BLOCKS.decode(arrays, NAME))(tensors)
    eager = BLOCKS.decode(tensors, NAME)
    jax.tree.map(np.testing.assert_array_equal, jitted, eager)


def test_matches():
    assert FP8Scheme.holds(random_module(BLOCKS))
    assert FP8Scheme.holds(random_module(CHANNELS))
    assert FP8Scheme.holds({"weight": np.zeros((2, 2), E4M3)})
    assert FP8Scheme.holds({"weight_scale": np.zeros((2, 1))})
    assert not FP8Scheme.holds({"weight": np.zeros((2, 2), np.float16), "scales": np.zeros((2, 2))})


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
        config.decode({**random_module(config), suffix: array}, NAME)


@pytest.mark.parametrize("config", [BLOCKS, CHANNELS])
def test_missing_tensors(config):
    for suffix in ("weight", config.scale_name):
        tensors = random_module(config)
        del tensors[suffix]
        with pytest.raises(CheckpointError, match=f"{NAME} has no tensor {suffix}"):
            config.decode(tensors, NAME)


def test_shape_that_the_model_expects():
    assert BLOCKS.check(random_module(BLOCKS), NAME, (256, 200)) == (256, 200)
    with pytest.raises(CheckpointError, match=r"256 input and 200 output.*expects 128 and 200"):
        BLOCKS.decode(random_module(BLOCKS), NAME, (128, 200))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_weights_that_are_not_numbers(byte):
    tensors = random_module(BLOCKS)
    codes = tensors["weight"].view(np.uint8)
    codes[3, 5] = byte
    with pytest.raises(CheckpointError, match=f"{NAME}.weight has weights that are NaN"):
        BLOCKS.decode(tensors, NAME)


def test_blocks_that_are_larger_than_any_matrix_take_no_memory():
    tensors = random_module(FP8Scheme("fp8", (10**12, 128), "float8"))
    scales = FP8Scheme("fp8", (10**12, 128), "float8").decode(tensors, NAME).scales
    np.testing.assert_array_equal(scales, np.tile(tensors["weight_scale_inv"].T, (1, 200)))


parse = FP8Scheme.from_config
BLOCK = (128, 128)


def test_the_fine_grained_format():
    config = parse(FP8)
    assert config == FP8Scheme("fp8", BLOCK, "float8")
    assert config.scale_name == "weight_scale_inv"
    assert config.weights == WeightFormat.parse("float8:g128/float8")
    # Keys that older files leave out.
    assert parse({"quant_method": "fp8", "weight_block_size": [128, 128]}) == config
    assert parse(FP8 | {"weight_block_size": [64, 128]}).block == (64, 128)


@pytest.mark.parametrize(
    ("strategy", "activations", "block", "format"),
    [
        ("channel", "token", (1, None), "float8:gK/float8"),
        ("tensor", "token", (None, None), "float8:gK/float8"),
        ("block", "group", BLOCK, "float8:g128/float8"),
        ("channel", None, (1, None), "float8:gK"),
        ("tensor", None, (None, None), "float8:gK"),
        ("block", None, BLOCK, "float8:g128"),
    ],
)
def test_compressed_tensors(strategy, activations, block, format):
    config = parse(compressed_fp8(strategy, activations))
    assert config.block == block
    assert config.weights == WeightFormat.parse(format)
    assert config.unsupported_activations is None
    assert config.scale_name == "weight_scale"


def test_a_scheme_of_the_cache_says_that_there_are_scales():
    written = compressed_fp8("channel", "token")
    assert not parse(written).has_cache_scales
    for strategy in ("tensor", "attn_head"):
        written["kv_cache_scheme"] = CACHE | {"strategy": strategy}
        assert parse(written).has_cache_scales


def test_groups_of_one_scheme_are_one():
    written = compressed_fp8("channel", "token")
    [group] = written["config_groups"].values()
    written["config_groups"] = {"FP8_DYNAMIC": group, "attention": group}
    assert parse(written) == parse(compressed_fp8("channel", "token"))
    [other] = compressed_fp8("tensor", "token")["config_groups"].values()
    written["config_groups"]["attention"] = other
    with pytest.raises(CheckpointError, match="config_groups FP8_DYNAMIC, attention differ"):
        parse(written)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_static_scales_of_activations(strategy):
    scheme = parse(compressed_fp8(strategy, "tensor", False))
    assert scheme == FP8Scheme(
        "compressed-tensors", (None if strategy == "tensor" else 1, None), "float8", is_static=True
    )
    assert scheme.for_experts() == parse(compressed_fp8(strategy, "token"))
    tensors = random_module(scheme) | {"input_scale": np.full(1, 0.25, np.float32)}
    assert scheme.decode(tensors, NAME).activation_scale == 0.25
    sixteen, _ = scheme.choices
    assert sixteen.decode(tensors, NAME).activation_scale is None
    del tensors["input_scale"]
    assert sixteen.check(tensors, NAME) == (256, 200)
    with pytest.raises(CheckpointError, match=f"{NAME} has no tensor input_scale"):
        scheme.check(tensors, NAME)


def integers(written):
    written["config_groups"]["group_0"]["input_activations"]["type"] = "int"
    return written


@pytest.mark.parametrize(
    ("written", "what"),
    [
        (FP8 | {"activation_scheme": "static"}, "FP8 with static scales"),
        (compressed_fp8("block", "tensor", False), "8-bit float with static scales"),
        (compressed_fp8("channel", "tensor"), "dynamic scales (strategy 'tensor')"),
        (compressed_fp8("block", "token"), "dynamic scales (strategy 'token')"),
        (compressed_fp8("channel", "group"), "dynamic scales (groups of 128)"),
        (integers(compressed_fp8("channel", "token")), "8-bit int with dynamic scales"),
    ],
)
def test_other_activations_are_left_to_somebody_to_choose(written, what):
    config = parse(written)
    assert what in (config.unsupported_activations or "")
    assert config.activations is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq': expected 'fp8' or 'compressed-tensors'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2': expected 'e4m3'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0': expected 'float'"),
        ({"activation_scheme": 1}, "activation_scheme is 1: expected 'dynamic' or 'static'"),
        ({"weight_block_size": [128, 64]}, "weight_block_size is [128, 64]: expected [128, 128]"),
        ({"weight_block_size": None}, "weight_block_size is None: expected [128, 128]"),
        ({"weight_block_size": [128]}, "weight_block_size is [128]: expected"),
        ({"weight_block_size": [0, 128]}, "weight_block_size is [0, 128]: expected"),
        ({"weight_block_size": [True, 128]}, "weight_block_size is [True, 128]: expected"),
    ],
)
def test_fine_grained_errors(changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse(FP8 | changes)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "pack-quantized", "format is 'pack-quantized': expected 'float-quantized'"),
        (["format"], None, "format is None: expected 'float-quantized' or 'naive-quantized'"),
        (["kv_cache_scheme"], [8], "kv_cache_scheme is [8]: expected an object"),
        (["kv_cache_scheme"], CACHE | {"type": "int"}, "kv_cache_scheme: type is 'int': expected"),
        (["kv_cache_scheme"], CACHE | {"dynamic": "local"}, "kv_cache_scheme: dynamic is 'local'"),
        (["kv_cache_scheme"], CACHE | {"strategy": "channel"}, "strategy is 'channel': expected"),
        (["transform_config"], {"config_groups": {"R1": {}}}, "there is a transform_config"),
        (["config_groups"], {}, "config_groups is {}: expected a map of groups"),
        (["config_groups", "group_0"], [], "group 'group_0' is []: expected an object"),
        (["config_groups", "group_0", "format"], "dense", "group 'group_0': format is 'dense'"),
        (["config_groups", "group_0", "weights"], None, "weights is None: expected an object"),
        (
            ["config_groups", "group_0", "input_activations"],
            "dynamic",
            "group 'group_0', input_activations is 'dynamic': expected an object",
        ),
        (["config_groups", "group_0", "output_activations"], {"num_bits": 8}, "output_activations"),
        (["config_groups", "group_0", "weights", "type"], "int", "type is 'int': expected 'float'"),
        (["config_groups", "group_0", "weights", "num_bits"], 4, "num_bits is 4: expected 8"),
        (["config_groups", "group_0", "weights", "symmetric"], False, "symmetric is False"),
        (["config_groups", "group_0", "weights", "strategy"], "group", "strategy is 'group'"),
        (["config_groups", "group_0", "weights", "block_structure"], [64, 64], "is [64, 64]: exp"),
    ],
)
def test_compressed_tensors_errors(path, value, message):
    written = copy.deepcopy(compressed_fp8("block", "group"))
    node = written
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse(written)


def test_a_precision_may_choose_the_activations():
    static = parse(FP8 | {"activation_scheme": "static"})
    assert [str(choice.weights) for choice in static.choices] == [
        *("float8:g128", "float8:g128/float8"),
    ]
    assert not any(choice.unsupported_activations for choice in static.choices)
    assert static.quant_method == "fp8"
    assert CHANNELS.quant_method == "compressed-tensors"


@pytest.mark.parametrize(
    ("layout", "format", "rows"),
    [
        ("float-quantized", "float8/float8", 1),
        ("float-quantized", "float8", 1),
        ("float-quantized", "float8:g128/float8", 128),
        ("float-quantized", "float8:g128", 128),
        ("fp8", "float8:g128/float8", 128),
    ],
)
def test_what_is_written_is_read(layout, format, rows):
    plain = random_plain(format, (200, 150), rows=rows)
    scheme = FP8Scheme.of_layout(layout, {NAME: plain})
    assert parse(scheme.quantization_config(["lm_head"])) == scheme
    found = parse(scheme.quantization_config(["lm_head"], "tensor"))
    assert found.has_cache_scales == scheme.can_hold_cache_scales == (layout != "fp8")
    again = scheme.decode(scheme.encode(plain, NAME), NAME, (200, 150))
    assert again.format == plain.format
    if format == "float8/float8":
        static = dataclasses.replace(plain, activation_scale=np.full(1, 0.5, np.float32))
        scheme = FP8Scheme.of_layout(layout, {NAME: static})
        assert parse(scheme.quantization_config(["lm_head"])) == scheme
        assert scheme.decode(scheme.encode(static, NAME), NAME).activation_scale == 0.5
    np.testing.assert_array_equal(again.scales, plain.scales)


def test_scales_that_no_block_has():
    plain = random_plain("float8:g128", (256, 150))
    scheme = FP8Scheme.of_layout("float-quantized", {NAME: plain})
    with pytest.raises(
        ValueError, match="scales that differ within a block of 128 output channels"
    ):
        scheme.encode(plain, NAME)
    for format in ("float8/float8", "float8:g128"):
        with pytest.raises(
            ValueError, match=r"'fp8' holds blocks of 128 .* export as 'float-quantiz"
        ):
            FP8Scheme.of_layout("fp8", {NAME: random_plain(format, (256, 8))})

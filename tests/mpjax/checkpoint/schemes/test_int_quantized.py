from __future__ import annotations

import contextlib
import copy
import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint.schemes.int_quantized import IntQuantizedScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.schemes.plain import random_plain
from tests.mpjax.checkpoint.write_checkpoint import (
    CACHE,
    LLAMA,
    compressed_integers,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)

NAME = "model.layers.0.mlp.down_proj"
WRITTEN = compressed_integers("int-quantized")
parse = IntQuantizedScheme.from_config
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


def random_module(by_channel=True, scale_dtype=np.float32):
    rng = np.random.default_rng(0)
    scales = rng.uniform(0.01, 0.1, (12, 1) if by_channel else 1).astype(scale_dtype)
    return {"weight": rng.integers(-128, 128, (12, 40), np.int8), "weight_scale": scales}


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_weight_is_code_times_scale(by_channel, scale_dtype):
    tensors = random_module(by_channel, scale_dtype)
    expected = tensors["weight"] * tensors["weight_scale"].astype(np.float32)
    for scheme in IntQuantizedScheme(by_channel).choices:
        plain = scheme.decode(tensors, NAME, (40, 12))
        np.testing.assert_array_equal(plain.dequantize(), expected.T)
    assert plain.format == WeightFormat("int8")
    assert plain.scales.dtype == np.float32


def with_activations(value):
    written = copy.deepcopy(WRITTEN)
    written["config_groups"]["group_0"]["input_activations"] = value
    return written


def test_configurations():
    assert parse(WRITTEN) == IntQuantizedScheme()
    assert parse(WRITTEN | {"format": "naive-quantized"}) == IntQuantizedScheme()
    assert parse(compressed_integers("int-quantized", strategy="tensor")).by_channel is False
    assert parse(WRITTEN | {"kv_cache_scheme": CACHE}).has_cache_scales
    assert parse(with_activations(None)) == IntQuantizedScheme(True, None)
    assert parse(with_activations(STATIC)) == IntQuantizedScheme(is_static=True)
    assert IntQuantizedScheme(is_static=True).for_experts() == IntQuantizedScheme()
    assert [choice.weights for choice in IntQuantizedScheme().choices] == [
        *(WeightFormat("uint8"), WeightFormat("int8")),
    ]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"dynamic": False}, "8-bit int with static scales (strategy 'token')"),
        (STATIC | {"symmetric": False}, "int with zero points and static scales (strategy 'tenso"),
        ({"symmetric": False}, "8-bit int with zero points and dynamic scales (strategy 'token')"),
        ({"strategy": "group", "group_size": 128}, "8-bit int with dynamic scales (groups of 128)"),
    ],
)
def test_other_activations_are_left_to_somebody_to_choose(changes, what):
    inputs = WRITTEN["config_groups"]["group_0"]["input_activations"]
    found = parse(with_activations(inputs | changes))
    assert what in (found.unsupported_activations or "")
    assert found == IntQuantizedScheme(True, None, found.unsupported_activations)


def test_a_checkpoint_with_static_zero_points_of_activations(tmp_path, rng):
    """A precision is asked for, and the file's scales of activations lie unread beside the maps."""
    written = with_activations(STATIC | {"symmetric": False})
    tensors, weights = random_tensors(LLAMA, rng), {}
    for name, (channels, outputs) in linear_shapes(LLAMA).items():
        module = {
            "weight": rng.integers(-128, 128, (outputs, channels), np.int8),
            "weight_scale": rng.uniform(0.001, 0.01, (outputs, 1)).astype(ml_dtypes.bfloat16),
            "input_scale": np.ones(1, np.float32),
            "input_zero_point": np.zeros(1, np.int8),
        }
        weights[name] = (module["weight"] * module["weight_scale"].astype(np.float32)).T
        replace_module(tensors, name, module)
    write_checkpoint(tmp_path, LLAMA | {"quantization_config": written}, tensors)
    with pytest.raises(
        CheckpointError, match=r"zero points and static scales.*: ask for .* W8A8KV"
    ):
        mpjax.load(tmp_path)
    for precision in ("W8gKA16KV16", "W8A8KV16"):
        model = mpjax.load(tmp_path, precision=precision).model
        for place in model.linear_places(model.config):
            found = np.concatenate([kernel.dequantize() for kernel in place.kernels(model)], 1)
            expected = np.concatenate([weights[name] for name in place.names], 1)
            np.testing.assert_array_equal(found, expected)


def test_float32_scales_beside_activations_of_16_bits(tmp_path, rng):
    """They are rounded to 16 bits, with a warning; beside 8-bit activations they stay."""
    tensors, weights = random_tensors(LLAMA, rng), {}
    for name, (channels, outputs) in linear_shapes(LLAMA).items():
        module = {
            "weight": rng.integers(-128, 128, (outputs, channels), np.int8),
            "weight_scale": rng.uniform(0.001, 0.01, (outputs, 1)).astype(np.float32),
        }
        weights[name] = (module["weight"] * module["weight_scale"]).T
        replace_module(tensors, name, module)
    write_checkpoint(tmp_path, LLAMA | {"quantization_config": WRITTEN}, tensors)
    for precision, most in (("W8A8KV16", 0), ("W8gKA16KV16", 2**-11)):
        expected = r"rounded to float16, in which W8gK keeps them: by 0\.05% at most$"
        with pytest.warns(match=expected) if most else contextlib.nullcontext():
            model = mpjax.load(tmp_path, precision=precision).model
        for place in model.linear_places(model.config):
            found = np.concatenate([kernel.dequantize() for kernel in place.kernels(model)], 1)
            wanted = np.concatenate([weights[name] for name in place.names], 1)
            assert (abs(found - wanted) <= abs(wanted) * most).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 4}, "weights: num_bits is 4: expected 8"),
        ({"symmetric": False}, "weights: symmetric is False: expected True"),
        ({"strategy": "group"}, "weights: strategy is 'group': expected 'channel' or 'tensor'"),
        ({"type": "float"}, "weights: type is 'float': expected 'int'"),
    ],
)
def test_config_errors(weights, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        parse(compressed_integers("int-quantized", **weights))
    with pytest.raises(
        CheckpointError, match="format is 'pack-quantized': expected 'int-quantized'"
    ):
        parse(compressed_integers())
    with pytest.raises(CheckpointError, match="input_activations is 'x': expected an object"):
        parse(with_activations("x"))


def test_groups_that_differ():
    written = copy.deepcopy(WRITTEN)
    group = written["config_groups"]["group_0"]
    written["config_groups"]["b"] = group | {"input_activations": None}
    with pytest.raises(
        CheckpointError, match="config_groups group_0, b differ: expected one scheme"
    ):
        parse(written)


@pytest.mark.parametrize(
    ("suffix", "array", "message"),
    [
        (
            "weight",
            np.zeros((12, 40), np.uint8),
            "weight is uint8 [12, 40]: expected int8 [12, 40]",
        ),
        ("weight", np.zeros(12, np.int8), "no tensor weight that is a matrix"),
        ("weight_scale", np.zeros(12, np.float32), "weight_scale is float32 [12]: expected"),
        ("weight_scale", np.zeros((12, 1), np.int8), "weight_scale is int8 [12, 1]: expected"),
    ],
)
def test_tensor_errors(suffix, array, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        IntQuantizedScheme().decode({**random_module(), suffix: array}, NAME)


def test_shapes_and_missing_tensors():
    with pytest.raises(CheckpointError, match=r"40 input and 12 output.*expects 64 and 12"):
        IntQuantizedScheme().check(random_module(), NAME, (64, 12))
    for suffix in IntQuantizedScheme.suffixes:
        tensors = random_module() | {"input_scale": np.ones(1, np.float32)}
        del tensors[suffix]
        with pytest.raises(CheckpointError, match=f"{NAME} has no tensor {suffix}"):
            IntQuantizedScheme(is_static=True).check(tensors, NAME)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_static_scales_of_activations_are_those_of_the_file(activations):
    scale = {"input_scale": np.full(1, 0.25, ml_dtypes.bfloat16)}
    scheme = IntQuantizedScheme(activations=activations, is_static=True)
    found = scheme.decode(random_module() | scale, NAME).activation_scale
    assert (found is None) == (activations is None)
    assert found is None or (found.dtype, float(found[0])) == (np.float32, 0.25)


def test_what_is_written_is_read():
    modules = {NAME: random_plain("int8", (40, 12))}
    scheme = IntQuantizedScheme.of_layout("int-quantized", modules)
    assert parse(scheme.quantization_config(["lm_head"])) == scheme
    assert parse(scheme.quantization_config(["lm_head"], "tensor")).has_cache_scales
    static = dataclasses.replace(modules[NAME], activation_scale=np.full(1, 0.5, np.float32))
    scheme = IntQuantizedScheme.of_layout("int-quantized", {NAME: static})
    assert parse(scheme.quantization_config(["lm_head"])) == scheme
    again = scheme.decode(scheme.encode(static, NAME), NAME)
    assert again.activation_scale == 0.5
    with pytest.raises(ValueError, match=f"{NAME} has a static scale, other none: export with"):
        scheme.of_layout("int-quantized", {NAME: static, "other": modules[NAME]})
    with pytest.raises(ValueError, match=r"'int-quantized' holds int8, and .* is W4g32"):
        scheme.of_layout("int-quantized", {NAME: random_plain("uint4:g32", (64, 8))})

"""The quantization_config of ModelOpt, and its FP8."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint.schemes import modelopt, registry
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.errors import CheckpointError

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


def test_fp8(rng):
    scheme = registry.read(FP8)
    assert (scheme.is_static, scheme.unsupported_activations) == (True, None)
    assert {choice.activations for choice in scheme.choices} == {None, "float8"}
    weight = rng.standard_normal((16, 32)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": np.array(0.25, np.float32)}
    tensors["input_scale"] = np.array(0.5, np.float32)
    assert registry.of_module(tensors) is FP8Scheme
    found = scheme.dequantize(tensors, "a", (32, 16))
    np.testing.assert_array_equal(found, weight.T.astype(np.float32) * 0.25)
    assert scheme.decode(tensors, "a").activation_scale == 0.5
    with pytest.raises(CheckpointError, match=r"weight_scale is float32 \[2\]: expected .* \[\]"):
        scheme.check(tensors | {"weight_scale": np.zeros(2, np.float32)}, "a")


@pytest.mark.parametrize(
    ("algorithm", "shape", "block", "activations"),
    [
        ("FP8_PER_CHANNEL_PER_TOKEN", (200,), (1, 256), "float8"),
        ("fp8_pb_wo", (2, 1, 2, 1), (128, 128), None),
        ("FP8_BLOCK_SCALES", (2, 2), (128, 128), None),
    ],
)
def test_scales_of_channels_and_of_blocks(algorithm, shape, block, activations, rng):
    scheme = registry.read(FP8 | {"quant_algo": algorithm})
    assert (scheme.activations, scheme.unsupported_activations) == (activations, None)
    weight = rng.standard_normal((200, 256)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.1, 1, shape).astype(np.float32)
    tensors = {"weight": weight, "weight_scale": scales}
    assert scheme.check(tensors, "a", (256, 200)) == (256, 200)
    grid = scales.reshape(-1, 256 // block[1])
    whole = np.repeat(np.repeat(grid, block[0], 0)[:200], block[1], 1)
    found = scheme.dequantize(tensors, "a", (256, 200))
    np.testing.assert_array_equal(found, (weight.astype(np.float32) * whole).T)
    with pytest.raises(CheckpointError, match=r"weight_scale is float32 \[3\]: expected"):
        scheme.check(tensors | {"weight_scale": np.zeros(3, np.float32)}, "a")


def test_algorithms():
    assert modelopt.algorithm(FP8) == "FP8"
    for unknown in ("MXFP8", "W4A8_AWQ", None):
        with pytest.raises(CheckpointError, match=f"quant_algo is {unknown!r}: expected FP8,"):
            registry.read(FP8 | {"quant_algo": unknown})


def test_an_fp8_cache_may_have_scales():
    scheme = {"type": "float", "num_bits": 8}
    for config, expected in (
        (FP8, False),
        (FP8 | {"kv_cache_quant_algo": "FP8"}, True),
        (FP8 | {"kv_cache_quant_algo": "NVFP4"}, False),
        (FP8 | {"kv_cache_scheme": scheme}, True),
        (FP8 | {"kv_cache_scheme": scheme | {"num_bits": 4}}, False),
    ):
        assert registry.read(config).has_cache_scales == expected
        assert registry.read(config).may_lack_cache_scales


def test_mixtures_that_are_refused():
    mixed = FP8 | {"quant_algo": "MIXED_PRECISION"}
    for layers, message in (
        (None, "quantized_layers is None: expected the algorithm of each module"),
        ({"a": 1}, "quantized_layers, 'a' is 1: expected an object"),
        ({"a": {"quant_algo": "W4A8_AWQ"}}, "quantized_layers, 'a': quant_algo is 'W4A8_AWQ'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            registry.read(mixed | {"quantized_layers": layers})


def test_older_files():
    written = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    assert modelopt.from_older(written) == FP8 | {"kv_cache_quant_algo": None}
    assert modelopt.from_older({}) is None

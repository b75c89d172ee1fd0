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
    assert scheme.unsupported_activations == "FP8 with static scales"
    assert {choice.activations for choice in scheme.choices} == {None, "float8"}
    weight = rng.standard_normal((16, 32)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": np.array(0.25, np.float32)}
    assert registry.of_module(tensors) is FP8Scheme
    found = scheme.dequantize(tensors, "a", (32, 16))
    np.testing.assert_array_equal(found, weight.T.astype(np.float32) * 0.25)
    with pytest.raises(CheckpointError, match=r"weight_scale is float32 \[2\]: expected .* \[\]"):
        scheme.check(tensors | {"weight_scale": np.zeros(2, np.float32)}, "a")


def test_algorithms():
    assert modelopt.algorithm(FP8) == "FP8"
    for unknown in ("FP8_PB_WO", "MIXED_PRECISION", None):
        with pytest.raises(CheckpointError, match=f"quant_algo is {unknown!r}: expected FP8,"):
            registry.read(FP8 | {"quant_algo": unknown})


def test_older_files():
    written = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    assert modelopt.from_older(written) == FP8 | {"kv_cache_quant_algo": None}
    assert modelopt.from_older({}) is None

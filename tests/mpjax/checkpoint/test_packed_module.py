from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.checkpoint.packed_module import check_packing, describe, packing, parse_switch
from mpjax.errors import CheckpointError


def specs(rows, columns):
    return {
        "qweight": jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        "scales": jax.ShapeDtypeStruct((32, 4096), jnp.float16),
    }


@pytest.mark.parametrize(
    ("tensors", "method"),
    [
        (specs(4096, 512), "awq"),
        (specs(512, 4096), "gptq"),
        (specs(1024, 4096), "gptq"),
        (specs(4096, 1024), None),
        ({"weight": jax.ShapeDtypeStruct((4096, 4096), jnp.float16)}, None),
        ({**specs(4096, 512), "scales": jax.ShapeDtypeStruct((4096,), jnp.float16)}, None),
    ],
)
def test_packing_by_shapes(tensors, method):
    assert packing(tensors) == method


def test_describe():
    assert describe(specs(4096, 512)["qweight"]) == "int32 [4096, 512]"


@pytest.mark.parametrize(
    ("tensors", "method", "message"),
    [
        (specs(4096, 512), None, "config.json has no quantization_config, but.* packed as AWQ"),
        (specs(512, 4096), None, "no quantization_config, but.* packed as GPTQ"),
        (specs(512, 4096), "awq", 'packed as GPTQ .*"quant_method": "gptq"'),
        (specs(4096, 512), "gptq", 'packed as AWQ .*"quant_method": "awq"'),
        (specs(4096, 100), None, "neither AWQ gemm"),
        ({}, "awq", "up_proj has no tensor qweight: found none"),
    ],
)
def test_check_packing(tensors, method, message):
    with pytest.raises(CheckpointError, match=message):
        check_packing("mlp.up_proj", tensors, method)


def test_check_packing_accepts_what_the_config_says():
    check_packing("mlp.up_proj", specs(4096, 512), "awq")
    check_packing("mlp.up_proj", specs(512, 4096), "gptq")


def test_switches():
    for value in (True, False, None):
        assert parse_switch({"sym": value}, "sym", "config") is value
    assert parse_switch({}, "sym", "config") is None
    for value in ("true", 1, [], 0.0):
        with pytest.raises(CheckpointError, match=r"config: sym is .*: expected true or false"):
            parse_switch({"sym": value}, "sym", "config")

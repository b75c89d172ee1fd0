from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mpjax.checkpoint.schemes import checks
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat

SCALES = jax.ShapeDtypeStruct((32, 4096), jnp.float16)


def test_describe():
    assert checks.describe(SCALES) == "float16 [32, 4096]"


def test_tensors():
    checks.check_tensors("up", {"scales": SCALES}, {"scales": ((32, 4096), ("float16",))})
    with pytest.raises(
        CheckpointError, match=r"^up has no tensor zeros: expected int8 \[2\], by b"
    ):
        checks.check_tensors("up", {"scales": SCALES}, {"zeros": ((2,), ("int8",))}, "bits 4")
    for wrong in (((32, 4095), ("float16",)), ((32, 4096), ("int8", "int32"))):
        message = r"^up\.scales is float16 \[32, 4096\]: expected (float16|int8 or int32) \[32, "
        with pytest.raises(CheckpointError, match=message):
            checks.check_tensors("up", {"scales": SCALES}, {"scales": wrong})


def test_weight_shapes():
    checks.check_weight_shape("up", (64, 32), None, None)
    checks.check_weight_shape("up", (64, 32), (64, 32), 32)
    with pytest.raises(
        CheckpointError, match=r"64 input and 32 output channels, by bits 8 in .* 32"
    ):
        checks.check_weight_shape("up", (64, 32), (32, 32), None, "bits 8")
    with pytest.raises(CheckpointError, match=r"^up has 64 input channels: expected a multiple of"):
        checks.check_weight_shape("up", (64, 32), (64, 32), 48)


def test_numbers():
    assert checks.parse_integer({"w_bit": 4}, ("bits", "w_bit"), "config") == 4
    assert checks.parse_group_size({"group_size": -1}, ("group_size",), "config") is None
    assert checks.parse_group_size({"group_size": 32}, ("group_size",), "config") == 32
    for found, message in (
        ({}, "^config has no bits: expected an integer$"),
        ({"bits": True}, "^config: bits is True: expected an integer$"),
        ({"bits": 0}, "^config: bits is 0: expected a positive number, or -1 for one group$"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checks.parse_group_size(found, ("bits",), "config")


def test_choices():
    checks.require_choice({"fmt": "e4m3"}, "fmt", ("e4m3",), "config")
    checks.require_choice({}, "fmt", ("e4m3",), "config", default="e4m3")
    for found in ({}, {"fmt": None}, {"fmt": ["e4m3"]}):
        with pytest.raises(
            CheckpointError, match=r"^config: fmt is .*: expected 'e4m3' or 'e5m2'$"
        ):
            checks.require_choice(found, "fmt", ("e4m3", "e5m2"), "config")


def test_switches():
    for value in (True, False, None):
        assert checks.parse_switch({"sym": value}, "sym", "config") is value
    assert checks.parse_switch({}, "sym", "config") is None
    for value in ("true", 1, [], 0.0):
        with pytest.raises(CheckpointError, match=r"config: sym is .*: expected true or false"):
            checks.parse_switch({"sym": value}, "sym", "config")


def test_groups_have_to_divide_the_channels():
    checks.require_groups("head", 576, WeightFormat.parse("uint4:g64"))
    message = "head has 576 input channels, which groups of 128 don't divide: .* W4gK, .* or H4gK$"
    with pytest.raises(CheckpointError, match=message):
        checks.require_groups("head", 576, WeightFormat.parse("uint4:g128"))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_check_scales(dtype):
    scales = jnp.ones((4, 6), dtype)
    checks.check_scales("model.layers.0.mlp.up_proj", scales)
    damaged = scales.at[0, 1].set(jnp.nan).at[2, 3].set(jnp.inf).at[3, 5].set(-jnp.inf)
    with pytest.raises(CheckpointError, match=r"^model\.layers\.0\.mlp\.up_proj: 3 of the 24"):
        checks.check_scales("model.layers.0.mlp.up_proj", damaged)

    def traced(scales):
        checks.check_scales("model.layers.0.mlp.up_proj", scales)
        return scales

    jax.jit(traced)(damaged)  # where no value is known

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax.activation_widths import count_blocks
from tests.models.small import linear_layers

MAPS = 4 * 2  # linear maps, in as many layers, of one block each


def test_a_model_without_calibration_says_so(tiny_folder):
    with pytest.warns(UserWarning, match="W4AxKV4: without a text nothing says which blocks"):
        lm = mpjax.load(tiny_folder, precision="W4AxKV4")
    assert lm.precision == "W4AxKV4"
    assert count_blocks(lm.model) == (MAPS, MAPS)
    assert dict(lm.describe())["activations in 8 bits"] == "8 of 8 blocks, 100.0%; the others in 4"


@pytest.mark.parametrize(("precision", "wide"), [("W4A4KV16", 0), ("W4Ax1KV16", MAPS)])
def test_blocks_that_are_alike_need_no_text(tiny_folder, precision, wide):
    lm = mpjax.load(tiny_folder, precision=precision)
    assert count_blocks(lm.model) == (wide, MAPS)
    assert lm.summary()["eight_bit_blocks"] == (wide, MAPS)


def test_devices_have_the_blocks_of_their_shares(tiny_folder):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("shards",))
    lm = mpjax.load(tiny_folder, precision="W4A4KV16", devices=mesh)
    assert count_blocks(lm.model) == (0, MAPS)
    for linear in linear_layers(lm.model):
        kernel = linear.kernel.get_value()
        assert kernel.activation_bits.sharding == NamedSharding(mesh, PartitionSpec("shards"))


def test_blocks_of_shapes_are_not_counted(tiny_folder, tiny):
    lm = mpjax.load(tiny_folder, precision="W4A4KV16")
    [linear, *_] = linear_layers(lm.model)
    kernel = linear.kernel.get_value()
    shape = nnx.eval_shape(lambda: jnp.ones(1, jnp.uint8))
    linear.kernel.set_value(dataclasses.replace(kernel, activation_bits=shape))
    assert count_blocks(lm.model) is None
    assert count_blocks(tiny.model) is None

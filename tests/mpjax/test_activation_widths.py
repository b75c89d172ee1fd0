from __future__ import annotations

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax import activation_widths
from mpjax.activation_widths import (
    BlockCount,
    blocks_of_share,
    count_blocks,
    find_share,
    has_share,
)
from mpjax.cli.info import inspect
from mpjax.precision import Precision
from tests.models.small import linear_layers

MAPS = 4  # linear maps, of one block each, in one layer


def test_a_model_without_calibration_says_so(tiny_folder):
    with pytest.warns(UserWarning, match="W4AxKV4: without a text nothing says which blocks"):
        lm = mpjax.load(tiny_folder, precision="W4AxKV4")
    assert lm.precision == "W4Ax1KV4"
    assert count_blocks(lm.model) == (MAPS, MAPS)
    assert dict(lm.describe())["activations in 8 bits"] == "4 of 4 blocks, 100.0%; the others in 4"


@pytest.mark.parametrize(("precision", "wide"), [("W4A4KV16", 0), ("W4Ax1KV16", MAPS)])
def test_blocks_that_are_alike_need_no_text(tiny_folder, precision, wide):
    lm = mpjax.load(tiny_folder, precision=precision)
    assert lm.precision == precision
    assert count_blocks(lm.model) == (wide, MAPS)
    assert lm.summary()["eight_bit_blocks"] == (wide, MAPS)


def test_devices_have_the_blocks_of_their_shares(tiny_folder):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("shards",))
    lm = mpjax.load(tiny_folder, precision="W4A4KV16", devices=mesh)
    assert lm.precision == "W4A4KV16"
    assert count_blocks(lm.model) == (0, MAPS)
    for linear in linear_layers(lm.model):
        kernel = linear.kernel.get_value()
        assert kernel.activation_bits.sharding == NamedSharding(mesh, PartitionSpec("shards"))


@pytest.mark.parametrize(
    ("wide", "one_in", "others"),
    [
        ([0, 0], 0, []),
        ([4, 4], 1, []),
        ([1, 1], 8, [4, 16]),
        ([2, 2], 2, [8]),
        ([1, 2], 8, []),  # no single share
    ],
)
def test_the_share_is_that_of_every_layer(two_layers_folder, wide, one_in, others):
    """W4Ax alone is the name of any model with blocks of both widths."""
    lm = mpjax.load(two_layers_folder, precision="W4A4KV16")
    for layer, count in enumerate(wide):
        for linear in linear_layers(lm.model)[4 * layer :][:count]:
            kernel = linear.kernel.get_value()
            bits = jnp.full(1, 8, jnp.uint8)
            linear.kernel.set_value(dataclasses.replace(kernel, activation_bits=bits))
    assert find_share(lm.model) == one_in
    assert Precision.parse(lm.precision).wide_blocks == one_in
    agreeing = {share for share in (0, 1, 2, 4, 8, 16) if has_share(lm.model, share)}
    assert agreeing == {one_in, *others}


def test_a_power_of_two_names_the_share(monkeypatch, tiny):
    """Of 12 blocks, shares of 9 and more have one: 16 is what was probably asked for."""
    for counts, one_in in (([(1, 12)] * 2, 16), ([(4, 12)], 3), ([(2, 12)], 8)):
        layers = [BlockCount(*count) for count in counts]
        monkeypatch.setattr(activation_widths, "count_by_layer", lambda model, it=layers: it)
        assert find_share(tiny.model) == one_in


def test_a_share_is_rounded_to_one_block_at_least():
    assert [blocks_of_share(Fraction(share, 10)) for share in (1, 14, 15, 40)] == [1, 1, 2, 4]


@pytest.mark.parametrize("precision", ["W4A4KV16", "W4Ax1KV16"])
def test_a_saved_model_has_one_share(tiny_folder, tmp_path, precision):
    mpjax.save(mpjax.load(tiny_folder, precision=precision), tmp_path / "saved")
    assert mpjax.load(tmp_path / "saved", precision=precision).precision == precision
    assert inspect(tmp_path / "saved").precision == precision
    for other in {"W4A4KV16", "W4AxKV16", "W4Ax16KV16", "W4Ax1KV16"} - {precision}:
        weights = precision.removesuffix("KV16")
        with pytest.raises(ValueError, match=f"precision is {other}, but .* {weights}: ask for"):
            mpjax.load(tmp_path / "saved", precision=other)


def test_blocks_of_shapes_are_not_counted(tiny_folder, tiny):
    lm = mpjax.load(tiny_folder, precision="W4A4KV16")
    [linear, *_] = linear_layers(lm.model)
    kernel = linear.kernel.get_value()
    shape = nnx.eval_shape(lambda: jnp.ones(1, jnp.uint8))
    linear.kernel.set_value(dataclasses.replace(kernel, activation_bits=shape))
    assert count_blocks(lm.model) is None
    assert lm.precision == "W4AxKV16"
    assert count_blocks(tiny.model) is None

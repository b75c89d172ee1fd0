"""The base of schemes that round; formats that use it have tests of whole checkpoints."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.checkpoint.schemes.rounded import BOUND, ROUNDED, RoundedScheme, round_to
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat, pack, quantize


@dataclasses.dataclass(frozen=True)
class Halves(RoundedScheme):
    """Weights that are stored as twice themselves."""

    title, methods, suffixes = "halves", ("halves",), ("weight",)

    @classmethod
    def from_config(cls, config):
        return cls()

    @classmethod
    def holds(cls, specs):
        return "weight" in specs

    def check(self, specs, name, shape=None):
        return specs["weight"].shape[::-1]

    def dequantize(self, tensors, name, shape=None):
        return jnp.asarray(tensors["weight"]).T / 2


def test_weights_are_rounded_to_a_format(rng):
    weight = rng.standard_normal((16, 64)).astype(np.float32)
    scheme, expected = Halves(), jnp.asarray(weight.T / 2)
    for given, format in ((scheme, ROUNDED), (scheme.rounded_to(four := four_bits()), four)):
        assert given.format("a", 64) == format
        found = pack(given.decode({"weight": weight}, "a"))
        np.testing.assert_array_equal(found.words, quantize(expected, format).words)
    assert scheme.target is None
    assert scheme.loss == f"halves is rounded to W8g32{BOUND}"
    assert scheme.rounded_to(four_bits()).loss == "halves is rounded to W4g64"
    assert round_to(expected, ROUNDED).format == ROUNDED


def four_bits():
    return WeightFormat("uint4", 64)


def test_groups_must_divide_the_channels():
    with pytest.raises(CheckpointError, match="a has 96 input channels, which groups of 64 don't"):
        Halves(target=four_bits()).format("a", 96)

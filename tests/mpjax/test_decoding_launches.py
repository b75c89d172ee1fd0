"""Whether the kernels of a step may be launched early: not beside those of warpgroups."""

from __future__ import annotations

import dataclasses

import pytest
from flax import nnx

from mpjax import decoding
from mpjax.bench.random_model import random_model
from mpjax.kernels import WeightFormat, device
from mpjax.models import Llama, Mixtral, presets
from tests.mpjax.test_decoding import KERNELS_CONFIG


@pytest.mark.parametrize("shape", [(128, 256), (128, 128)])
def test_one_product_by_warpgroups_is_enough(shape, monkeypatch):
    """Among weights of one format, a product of any shape counts."""
    model = random_model(Llama, KERNELS_CONFIG, WeightFormat.parse("uint4:g128"))
    monkeypatch.setattr(
        decoding, "runs_by_warpgroups", lambda problem: (problem.channels, problem.outputs) == shape
    )
    assert decoding.has_warpgroups(model, 1)


def test_experts_have_plans_of_their_own(monkeypatch):
    """A step of rows, of which each expert has few, is not one of warpgroups."""
    config = dataclasses.replace(presets.MIXTRAL_8X7B, layers=presets.MIXTRAL_8X7B.layers[:1])
    format = WeightFormat.parse("uint4:g128")
    model = nnx.eval_shape(lambda: random_model(Mixtral, config, format))
    monkeypatch.setattr(decoding, "runs_by_warpgroups", lambda problem: False)
    with device.described_as("NVIDIA H200"):
        found = [decoding.has_warpgroups(model, rows) for rows in (1, 64, 256)]
    assert found == [False, False, True]

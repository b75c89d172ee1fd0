from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax.bench.random_model import random_model
from mpjax.kernels import WeightFormat
from mpjax.language_model import weight_formats
from mpjax.models import ExpertsSpec, Qwen3, Qwen3MoE
from tests.mpjax.bench.rows import SMALL_MODEL


@pytest.mark.parametrize("text", ["uint4:g128", "uint8:g128", "bfloat16"])
def test_every_linear_map_has_the_format_and_the_model_runs(text):
    model = random_model(Qwen3, SMALL_MODEL, WeightFormat.parse(text))
    assert weight_formats(model) == {WeightFormat.parse(text)}
    logits = jax.jit(lambda model, tokens: model(tokens))(model, jnp.arange(12).reshape(2, 6))
    assert logits.shape == (2, 6, SMALL_MODEL.vocab_size)
    assert bool(jnp.isfinite(logits).all())
    assert float(jnp.std(logits)) > 0.05  # no token is the only one


def test_blocks_of_experts():
    spec = ExpertsSpec(128, num_experts=4)
    layers = tuple(dataclasses.replace(layer, mlp=spec) for layer in SMALL_MODEL.layers)
    config = dataclasses.replace(SMALL_MODEL, layers=layers)
    model = random_model(Qwen3MoE, config, WeightFormat.parse("int4:g128/int8"))
    experts = model.layers[0].mlp.experts
    for linear, is_ordered in ((experts.gate_up, True), (experts.down, False)):
        kernel = linear.kernel.get_value()
        assert kernel.activation_bits.shape == kernel.parameters.shape[:2]
        assert (kernel.permutation is not None) == is_ordered

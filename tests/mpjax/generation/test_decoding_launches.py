"""The kernels of a step with experts, and whether they may be launched early."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mpjax.bench.random_model import random_model
from mpjax.generation import decoding
from mpjax.kernels import KVFormat, WeightFormat, device
from mpjax.kernels.plans import tables
from mpjax.models import Llama, Mixtral, Qwen3MoE
from mpjax.models.presets import published
from tests.mpjax.generation.test_decoding import KERNELS_CONFIG


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
    _, whole = published("mixtral-8x7b")
    config = dataclasses.replace(whole, layers=whole.layers[:1])
    format = WeightFormat.parse("uint4:g128")
    model = nnx.eval_shape(lambda: random_model(Mixtral, config, format))
    monkeypatch.setattr(decoding, "runs_by_warpgroups", lambda problem: False)
    with device.described_as("NVIDIA H200"):
        found = [decoding.has_warpgroups(model, rows) for rows in (1, 64, 256)]
    assert found == [False, False, True]


def test_a_step_of_one_token_with_experts_has_nine_kernels_a_layer(
    lower_for_cuda, monkeypatch, tmp_path
):
    """A norm has the router's logits, and the first product of experts routes the token."""
    config = published("qwen3-30b-a3b")[1]
    config = dataclasses.replace(config, layers=config.layers[:1])
    model = nnx.eval_shape(lambda: random_model(Qwen3MoE, config, WeightFormat.parse("uint4:g128")))
    graph, state = nnx.split(model)
    cache = jax.eval_shape(lambda: model.create_cache(1, 2304, KVFormat(8)))
    tokens, counts = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)

    def step(state, tokens, counts, cache):
        return nnx.merge(graph, state).step(tokens, counts, cache)

    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))  # no plans of this machine's own
    with device.described_as("NVIDIA H200"):
        program = lower_for_cuda(step, state, tokens, counts, cache)
    assert collections.Counter(re.findall(r'name = "(\w+)", num_', program)) == {
        "add_rms_norm": 2,  # the second one before the head
        "matmul_uint4": 2,
        "rotate_and_append_kv8": 1,
        "attention_kv8": 1,
        "attention_combine": 1,
        "project_rms_norm": 1,
        "experts_routed_uint4": 1,
        "experts_uint4": 1,
    }
    assert program.count("stablehlo.dot_general") == 1  # the head

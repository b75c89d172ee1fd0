from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.kernels import WeightFormat
from mpjax.quantization import costs as cost_module
from mpjax.quantization.costs import plain_places, rounding_costs

pytestmark = pytest.mark.any_version

TEXTS = ["the quick brown fox jumps over the lazy dog, and then it sleeps " * 6]


FORMATS = [WeightFormat.parse(text) for text in ("table3:g64", "uint8:g128", "bfloat16")]


def test_each_map_and_format_has_a_cost(tiny):
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(tiny.model))]
    places = plain_places(tiny.model)
    costs = np.array(rounding_costs(tiny, TEXTS, [FORMATS] * len(places)))
    assert len(places) == 4 * tiny.config.num_layers
    assert all(map(np.array_equal, before, jax.tree.leaves(nnx.state(tiny.model))))
    assert (costs[:, 0] > 20 * costs[:, 1]).all()
    assert (costs[:, 1] > 0).all()
    assert (abs(costs[:, 2]) < 1e-6).all()


def test_costs_add_up(tiny):
    places = plain_places(tiny.model)
    costs = rounding_costs(tiny, TEXTS, [FORMATS[:1]] * len(places))
    text = jnp.asarray([tiny.tokenizer.encode(TEXTS[0])[:128]])
    expected = cost_module._logprobs(tiny.model, text)
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(cost_module._rounded(place, tiny.model, FORMATS[0]))
        found = cost_module._divergence(tiny.model, text, jnp.ones(text.shape, bool), expected)
    assert float(found) / text.size == pytest.approx(np.sum(costs), rel=0.4)


def test_packed_models_are_refused(tiny_folder):
    lm = mpjax.load(tiny_folder, precision="W4A16KV8")
    with pytest.raises(ValueError, match="qkv is quantised already: load the 16-bit checkpoint"):
        rounding_costs(lm, TEXTS, [FORMATS] * 8)

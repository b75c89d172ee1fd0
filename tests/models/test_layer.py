"""A layer with norms before and after its halves, against the same in NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import QuantizedActivations, WeightFormat, quantize
from mpjax.models import Decoder, DecoderLayer, Linear
from mpjax.models.layer import _read
from mpjax.models.layers import Projection
from mpjax.models.state import StepContext
from tests.models.small import CONFIG, small_config, small_model
from tests.pallas_kernels.oracles import random_array, relative_error, wide


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * wide(weight)


@pytest.mark.parametrize("norms", ["pre", "post", "both"])
def test_where_the_norms_are(norms, rng):
    layers = tuple(dataclasses.replace(layer, norms=norms) for layer in CONFIG.layers)
    model = small_model(dataclasses.replace(CONFIG, layers=layers))
    layer = model.layers[0]
    x = random_array(rng, (1, 5, 64), "float32")
    context = StepContext(model.angles_by_rope(jnp.arange(5)[None]))

    def normed(name, value):
        norm = getattr(layer, name)
        assert (norm is None) == (name.endswith("post_norm") == (norms == "pre")) or norms == "both"
        return value if norm is None else rms(value, norm.weight.get_value())

    stream = wide(x)
    read = jnp.asarray(normed("attention_norm", stream).astype(np.float32))
    stream += normed("attention_post_norm", wide(layer.attention(read, context)[0]))
    read = jnp.asarray(normed("mlp_norm", stream).astype(np.float32))
    stream += normed("mlp_post_norm", wide(layer.mlp(read)))
    terms, residual, _ = layer(x[None], None, context, None)
    assert relative_error(terms.sum(0) + residual, stream) < 1e-5
    after, inputs = layer.inputs(x, context.angles)
    assert relative_error(after, stream) < 1e-5
    assert relative_error(inputs["mlp.gate_up"], wide(read)) < 1e-5


def test_a_half_without_a_norm_rounds_its_input():
    """W8A8 maps read 8 bits also where no norm rounds to them."""
    stream = jnp.asarray(np.linspace(-1, 1, 256, dtype=np.float32).reshape(1, 256))
    kernel = Linear(quantize(jnp.ones((256, 8)), WeightFormat.parse("int8/int8")))
    residual, x = _read(None, stream[None], stream, kernel.activations)
    np.testing.assert_array_equal(residual, 2 * stream)
    assert isinstance(x, QuantizedActivations)
    assert relative_error(x.dequantize(), wide(2 * stream)) < 0.01


def test_products_beside_a_half_without_a_norm_are_its_own_matter():
    stream = jnp.ones((1, 256))
    residual, x = _read(None, stream[None], stream, Projection(jnp.ones((2, 256))))
    np.testing.assert_array_equal(residual, 2 * stream)
    np.testing.assert_array_equal(x, residual)


def test_layers_of_one_kind_are_alike():
    """So that one program serves them all."""
    graphs = [nnx.split(DecoderLayer(CONFIG, spec, nnx.Rngs(0)))[0] for spec in CONFIG.layers]
    assert graphs[0] == graphs[1]


@pytest.mark.skipif(not hasattr(jax, "Inline"), reason="JAX 0.12 has it")
def test_alike_layers_are_functions_that_a_cpu_compiles_once():
    """Only products of queries, keys and values, and the writing to pages, repeat."""
    texts = []
    for layers in (2, 6):
        model = Decoder(small_config(windows=(None,) * layers), nnx.Rngs(0))
        cache = model.create_cache(1, 64, "KV16")
        step = jax.jit(lambda tokens, cache, model=model: model.step(tokens, tokens[0], cache)[0])
        texts.append(step.lower(jnp.ones((1, 1), jnp.int32), cache).as_text())
    few, many = texts
    for name in ("_after_mixer", "paged_attention", "_rotated_heads"):
        assert few.count(f"func.func private @{name}(") == 1, name
        assert many.count(f"func.func private @{name}(") == 1, name
        assert many.count(f"call @{name}(") == 6
    assert many.count("dot_general") - few.count("dot_general") == 4

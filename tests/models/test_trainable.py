from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.kernels import QuantizedTensor, quantize
from mpjax.models import CacheScales, Decoder, Linear, trainable
from tests.models.small import quantize_kernels, small_config, small_model

TOKENS = jnp.arange(10).reshape(2, 5)


class Adapter(nnx.Param):
    """A parameter of a kind of its own."""


@pytest.fixture(scope="module", params=["uint4:g32", "table3:g64", "float8:gK/float8"])
def model(request):
    """A decoder of packed and plain linear maps, with all else that a model can hold."""
    model = small_model(small_config(windows=(None,), qkv_bias=True))
    [plain] = model.layers[0].attention.qkv.parts
    kernel = plain.kernel
    quantize_kernels(model, request.param)
    plain.kernel = kernel
    model.cache_scales = CacheScales(jnp.ones((1, 2, 2)))
    model.adapter = Adapter(jnp.ones(3))  # type: ignore[attr-defined]
    return model


def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    return jnp.square(model(tokens)).mean()


def paths(state: nnx.State) -> set[tuple]:
    return {path for path, _ in nnx.to_flat_state(state)}


def test_all_that_is_plain_is_trainable(model):
    _, parameters, rest = nnx.split(model, trainable, ...)
    found = paths(parameters)
    assert {("embedding",), ("norm", "weight"), ("adapter",)} < found
    assert ("layers", 0, "attention", "qkv", "parts", 0, "kernel") in found
    assert ("layers", 0, "attention", "qkv", "parts", 0, "bias") in found
    packed = ("attention", "output"), ("mlp", "gate_up", "parts", 0), ("mlp", "down")
    assert paths(rest) == {("layers", 0, *p, "kernel") for p in packed} | {("cache_scales",)}


def test_the_obvious_gradient_is_that_of_what_is_trainable(model):
    """nnx.grad looks for nnx.Param, and a packed weight is none."""
    obvious = nnx.grad(loss)(model, TOKENS)
    explicit = nnx.grad(loss, argnums=nnx.DiffState(0, trainable))(model, TOKENS)
    structure, parameters, rest = nnx.split(model, trainable, ...)
    split = jax.grad(lambda p: loss(nnx.merge(structure, p, rest), TOKENS))(parameters)
    assert paths(obvious) == paths(explicit) == paths(split) == paths(parameters)
    for leaves in zip(*map(jax.tree.leaves, (obvious, explicit, split)), strict=True):
        np.testing.assert_allclose(leaves[0], leaves[1], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(leaves[0], leaves[2], rtol=1e-5, atol=1e-7)
    assert float(jnp.abs(obvious["embedding"].get_value()).max()) > 0


def test_a_step_on_what_is_trainable_leaves_packed_weights_as_they_are(model):
    before = nnx.state(model, nnx.Not(trainable))
    gradients = nnx.grad(loss)(model, TOKENS)
    stepped = nnx.clone(model)
    nnx.update(
        stepped, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, trainable), gradients)
    )
    assert float(loss(stepped, TOKENS)) < float(loss(model, TOKENS))
    after = nnx.state(stepped, nnx.Not(trainable))
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))


def test_a_packed_weight_in_a_plain_parameter_is_not_trainable():
    linear = Linear(quantize(jnp.ones((64, 8)), "uint4:g32"), jnp.zeros(8))
    linear.kernel = nnx.Param(linear.kernel.get_value())
    assert isinstance(linear.kernel.get_value(), QuantizedTensor)
    assert paths(nnx.state(linear, trainable)) == {("bias",)}
    assert paths(nnx.state(linear, nnx.Param)) == {("bias",), ("kernel",)}


def test_shapes_are_as_trainable_as_arrays(model):
    abstract = nnx.eval_shape(lambda: nnx.clone(model))
    assert paths(nnx.state(abstract, trainable)) == paths(nnx.state(model, trainable))

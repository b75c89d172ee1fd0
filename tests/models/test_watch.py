"""Looking inside of decoders: what layers compute is captured, and changed."""

from __future__ import annotations

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import Addition, Decoder, Replacement, Steer
from mpjax.models.watch import read_capture
from tests.models.small import (
    CONFIG,
    hybrid_model,
    quantize_kernels,
    small_config,
    small_mixture,
    small_model,
)
from tests.sweeps import in_sweep

TOKENS = np.array([[3, 7, 1, 40, 2], [9, 9, 4, 0, 11]])


@pytest.fixture(scope="module")
def model():
    return small_model()


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def captured_of(model):
    layers, both = len(model.layers), [*range(len(model.layers))]
    capture = {"residual": [*both, layers], "attention": both, "mlp": both}
    return jax.jit(lambda model, tokens: model.inspect(tokens, capture=capture))(model, TOKENS)


@pytest.mark.parametrize("kind", ["plain", "hybrid", "shared", "post"])
def test_what_is_captured_is_what_layers_compute(kind, model):
    """The stream behind a layer is the one before it with both outputs."""
    if kind == "hybrid":
        model = hybrid_model()
    elif kind != "plain":
        layers = tuple(dataclasses.replace(layer, norms=kind) for layer in CONFIG.layers)
        model = small_model(dataclasses.replace(CONFIG, layers=layers))
    logits, found = captured_of(model)
    close(logits, jax.jit(type(model).__call__)(model, TOKENS))
    close(found["residual"][0], model.embed(TOKENS))
    for layer in range(len(model.layers)):
        outputs = found["attention"][layer] + found["mlp"][layer]
        close(found["residual"][layer] + outputs, found["residual"][layer + 1])
    close(model.logits(found["residual"][len(model.layers)]), logits)


def test_routers_choices_are_captured():
    model = small_mixture(shared=True)
    _, found = model.inspect(TOKENS, capture={"router": [0], "attention": [0]})
    layer = model.layers[0]
    stream = model.embed(TOKENS) + found["attention"][0]
    assert found["router"][0].shape == (2, 5, 2)
    np.testing.assert_array_equal(found["router"][0], layer.mlp.route(layer.mlp_norm(stream))[0])


def test_steps_capture_each_token_at_its_position(model):
    _, expected = model.inspect(TOKENS, capture={"residual": [1], "mlp": [0]})
    cache = model.create_cache(2, 32, "KV16", page_size=32)
    cache = model.watch(cache, 6, capture={"residual": [1], "mlp": [0]}, steer=())
    for piece, counts in ((TOKENS[:, :3], [3, 2]), (TOKENS[:, 2:4], [0, 2])):
        _, cache = model.step(piece, np.array(counts), cache)
    for point, layers in expected.items():
        for layer, values in layers.items():
            mine = cache.captured[point][layer]
            assert mine.shape == (2, 6, 64)
            close(mine[0, :3], values[0, :3])
            close(mine[1, :4], values[1, :4])
            assert not mine[0, 3:].any()
            assert not mine[1, 4:].any()


def test_a_stream_that_is_replaced_decides_all_that_follows(model):
    """With one vector at all positions, attention reads the same values whatever the tokens."""
    vector = jnp.arange(64.0)
    steer = Replacement(vector, layers=(1,))
    changed, found = model.inspect(TOKENS, steer=steer, capture={"residual": [1]})
    close(found["residual"][1], np.broadcast_to(vector, (2, 5, 64)))
    close(changed[0], changed[1])
    partly, _ = model.inspect(TOKENS, steer=dataclasses.replace(steer, begin=3))
    close(partly[:, :3], model(TOKENS)[:, :3])
    assert np.abs(partly[:, 3:] - model(TOKENS)[:, 3:]).max() > 0.1


@pytest.mark.parametrize("at", ["residual", "attention", "mlp"])
def test_additions_are_seen_by_all_that_follows_and_have_gradients(at, model):
    vectors = jnp.stack([jnp.ones(64), jnp.linspace(-1, 1, 64)])

    def run(vectors):
        steer = Addition(vectors, layers=(0, 1), at=at)
        return model.inspect(TOKENS, steer=[steer], capture={at: [0, 1]})

    _, plain = run(jnp.zeros_like(vectors))
    _, found = run(vectors)
    close(found[at][0] - plain[at][0], np.broadcast_to(vectors[0], (2, 5, 64)))
    slopes = jax.grad(lambda vectors: run(vectors)[0].std())(vectors)
    assert (jnp.abs(slopes).max(1) > 1e-4).all()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fading(Steer):
    """Scales the output of an MLP down along the positions."""

    rate: jax.Array
    layers: tuple[int, ...] = dataclasses.field(default=(0,), metadata={"static": True})
    at: str = dataclasses.field(default="mlp", metadata={"static": True})

    def __call__(self, value, layer, positions):
        return value * jnp.exp(-self.rate * positions.astype(value.dtype))[..., None]


def test_a_steer_of_ones_own_is_a_function_of_layer_and_position(model):
    fading = Fading(jnp.float32(0.5))
    _, found = model.inspect(TOKENS, steer=fading, capture={"mlp": [0]})
    _, plain = model.inspect(TOKENS, capture={"mlp": [0]})
    close(found["mlp"][0], plain["mlp"][0] * np.exp(-0.5 * np.arange(5))[None, :, None])


def test_programs_that_look_at_nothing_stay_the_same(model):
    cache = model.create_cache(2, 32, "KV8", page_size=32)
    step = jax.jit(type(model).step)
    text = step.lower(model, TOKENS, np.array([5, 5]), cache).as_text()
    unwatched = model.watch(cache, 8, capture={"residual": []}, steer=())
    assert step.lower(model, TOKENS, np.array([5, 5]), unwatched).as_text() == text
    watched = model.watch(cache, 8, capture={"residual": [1]}, steer=())
    assert step.lower(model, TOKENS, np.array([5, 5]), watched).as_text() != text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capture": {"stream": [0]}}, "capture has 'stream': expected one of residual, attention"),
        ({"capture": {"mlp": [2]}}, r"capture has \[2\] for 'mlp': the layers .* are \[0, 1\]"),
        ({"capture": {"router": [0]}}, r"capture has \[0\] for 'router': the layers .* are \[\]"),
        ({"capture": ["mlp"]}, "capture is"),
        ({"steer": 3}, "steer is 3: expected a tuple of Steer"),
        ({"steer": Addition(jnp.ones(64), (3,))}, r"steer has \[3\] for 'residual'"),
        ({"steer": Addition(jnp.ones(64), (0,), "router")}, 'at is "router", whose choices'),
    ],
)
def test_points_and_layers_that_a_model_lacks_are_refused(arguments, message, model):
    with pytest.raises(ValueError, match=message):
        model.inspect(TOKENS, **arguments)


def test_a_divided_model_is_refused(model):
    divided = types.SimpleNamespace(mesh="mesh", shards=2, config=model.config)
    with pytest.raises(ValueError, match="capture: the model is divided among 2 devices"):
        read_capture(divided, {"mlp": [0]})


@pytest.mark.parametrize("text", ["uint4:g32", in_sweep("liquid4:g64/int8")])
def test_a_watched_step_has_the_kernels_of_others_on_a_gpu(text, pretend_gpu, lower_for_cuda):
    config = small_config((6, None), head_dim=64, qk_norm=True, dtype="bfloat16")
    model = nnx.eval_shape(lambda: quantize_kernels(Decoder(config, nnx.Rngs(0)), text))
    graph, state = nnx.split(model)
    cache = jax.eval_shape(lambda: model.create_cache(2, 64, "KV8"))
    capture = {"residual": [0], "attention": [0], "mlp": [0]}
    tokens, counts = jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)

    def kernels(cache):
        def step(state, tokens, counts, cache):
            return nnx.merge(graph, state).step(tokens, counts, cache)

        program = lower_for_cuda(step, state, tokens, counts, cache)
        return set(re.findall(r'name = "(\w+)"', program))

    vector = jnp.ones(config.hidden_size, jnp.bfloat16)
    steer = Addition(vector, layers=(0,), at="mlp")
    watched = jax.eval_shape(
        lambda cache: model.watch(cache, 64, capture=capture, steer=steer), cache
    )
    assert kernels(watched) == kernels(cache)

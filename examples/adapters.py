"""Low-rank adapters on a model whose weights stay packed in 4 bits (QLoRA)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from mpjax.kernels import ActivationFormat
from mpjax.models import Decoder, Linear

RANK, STEPS, BATCH, LENGTH, RATE = 8, 24, 4, 128, 0.1


class Adapter(nnx.Param):
    """A trained matrix; the only variables with gradients."""


class AdaptedLinear(Linear):
    """A linear map plus a map of low rank, which is zero at first."""

    def __init__(self, base: Linear, key: jax.Array):
        kernel: Any = base.kernel.get_value()
        super().__init__(kernel, None if base.bias is None else base.bias.get_value())
        channels, outputs = kernel.shape
        self.down = Adapter(jax.random.normal(key, (channels, RANK)) / channels**0.5)
        self.up = Adapter(jnp.zeros((RANK, outputs)))

    @property
    def activations(self) -> ActivationFormat:
        """16 bits for any kernel, because the low-rank map needs x unrounded."""
        return ActivationFormat()

    def __call__(self, x: Any) -> jax.Array:
        """Maps x [..., in] to [..., out]."""
        change: jax.Array = x.astype(jnp.float32) @ self.down.get_value() @ self.up.get_value()
        return super().__call__(x) + change.astype(x.dtype)

    def terms(self, x: Any) -> jax.Array:
        """The map as a single term [1, ..., out]; see Linear.terms."""
        return self(x)[None]


lm = mpjax.load(mpjax.bundled_model(), precision="W4A16KV16", progress=False)
for index, layer in enumerate(lm.model.layers):
    keys = jax.random.split(jax.random.key(index), 2)
    layer.attention.output = AdaptedLinear(layer.attention.output, keys[0])
    layer.mlp.down = AdaptedLinear(layer.mlp.down, keys[1])
structure, adapters, frozen = nnx.split(lm.model, Adapter, ...)  # type: ignore[misc]

# A text unlike the Python source on which the model was trained.
text = "\n".join(f"The {n}th line says that {n} plus {n} is {2 * n}." for n in range(400))
assert lm.tokenizer is not None
ids = lm.tokenizer.encode(text)
tokens = jnp.array(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)


def loss(adapters: nnx.State, frozen: nnx.State, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in nats, of each token given the tokens before it."""
    model: Decoder = nnx.merge(structure, adapters, frozen)
    logprobs = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()


@jax.jit
def step(adapters: nnx.State, frozen: nnx.State, tokens: jax.Array) -> tuple[nnx.State, jax.Array]:
    """Makes a step of gradient descent; returns the new adapters and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(adapters, frozen, tokens)
    return jax.tree.map(lambda weight, g: weight - RATE * g, adapters, gradient), value


for count in range(STEPS):
    first = count * BATCH % (len(tokens) - BATCH)
    adapters, value = step(adapters, frozen, tokens[first : first + BATCH])
    if count % 4 == 0 or count == STEPS - 1:
        print(f"step {count:2}: loss {value:.3f}")

"""Learns the scales of a model whose weights are packed in 2 bits (FLUTE), and saves the result."""

from __future__ import annotations

import inspect
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from mpjax.kernels import matmul, replace_scales, unpack
from mpjax.models import Decoder, Linear

STEPS, ROWS, LENGTH, RATE = 16, 8, 96, 0.03


class Scales(nnx.Param):
    """Trained scales, float32 [groups, outputs]; the only variables with gradients."""


class ScaledLinear(Linear):
    """A packed linear map whose scales are a parameter, which begins as the weight's own."""

    def __init__(self, base: Linear):
        kernel: Any = base.kernel.get_value()
        super().__init__(kernel, None if base.bias is None else base.bias.get_value())
        self.scales = Scales(unpack(kernel).scales.astype(jnp.float32))

    def product(self, x: Any) -> jax.Array:
        """Product of x and the kernel; the scales are rounded to 16 bits, as when stored."""
        kernel: Any = self.kernel.get_value()
        return matmul(x, kernel, scales=self.scales.get_value())

    def terms(self, x: Any) -> jax.Array:
        """The map as a single term [1, ..., out]; see Linear.terms."""
        return self(x)[None]

    def packed(self) -> Linear:
        """A Linear with the learned scales in its packed weight."""
        kernel = replace_scales(self.kernel.get_value(), self.scales.get_value())
        return Linear(kernel, None if self.bias is None else self.bias.get_value())


@nnx.jit
def loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean negative log-likelihood, in nats, of each token given the tokens before it."""
    chances = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean()


@nnx.jit
def step(model: Decoder, tokens: jax.Array) -> None:
    """Makes a step of sign descent: each scale grows or shrinks by RATE, against its gradient."""
    gradient = nnx.grad(loss, argnums=nnx.DiffState(0, Scales))(model, tokens)
    scales = nnx.state(model, Scales)
    nnx.update(model, jax.tree.map(lambda s, g: s * (1 - RATE * jnp.sign(g)), scales, gradient))


def replace(model: Decoder, change: Any) -> None:
    """Replaces every linear map of a model by change(map)."""
    for layer in model.layers:
        layer.attention.output = change(layer.attention.output)
        layer.mlp.down = change(layer.mlp.down)
        for fused in (layer.attention.qkv, layer.mlp.gate_up):
            fused.parts = nnx.List([change(part) for part in fused.parts])


lm = mpjax.load(mpjax.bundled_model(), precision="WNF2A16KV16", progress=False)
assert lm.tokenizer is not None
ids = lm.tokenizer.encode(inspect.getsource(textwrap))  # Python, as in training
tokens, others = jnp.array(ids[: 2 * ROWS * LENGTH]).reshape(2, ROWS, LENGTH)

before = loss(lm.model, others)
replace(lm.model, ScaledLinear)
for _ in range(STEPS):
    step(lm.model, tokens)
learned = loss(lm.model, others)
replace(lm.model, ScaledLinear.packed)
with tempfile.TemporaryDirectory() as folder:
    mpjax.save(lm, Path(folder) / "model")
    restored = mpjax.load(Path(folder) / "model", progress=False)
exact = loss(mpjax.load(mpjax.bundled_model(), progress=False).model, others)
print(
    f"{lm.precision}: loss {before:.3f}, with learned scales {learned:.3f}, saved and loaded "
    f"{loss(restored.model, others):.3f}; in 16 bits {exact:.3f}"
)

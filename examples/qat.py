"""Quantisation-aware fine-tuning of the bundled model, whose linear maps are packed in 2 bits.

    python examples/qat.py                    # trains the scales, then master copies
    python examples/qat.py --train master

Both train on Python's own source, and print the perplexity of other files before and after.

scales: the codes don't change, and the scales of the packed weights are trained.
master: a float32 copy of each weight is trained. The forward pass rounds it and multiplies by the
    packed weight, and its gradient is that of an unrounded weight (straight-through).
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
from mpjax.kernels import QuantizedTensor, matmul, quantize, replace_scales, unpack
from mpjax.models import Decoder, Linear

LENGTH, BATCH = 128, 4
RATES = {"scales": 1e-2, "master": 3e-4}


class Trained(nnx.Param):
    """An array that the optimizer changes: the changes of scales, or a master copy."""


class ScaledLinear(Linear):
    """A packed map whose scales are those of the start times 1 + gains."""

    def __init__(self, packed: QuantizedTensor, weight: jax.Array):
        super().__init__(packed)
        self.start = nnx.Variable(unpack(packed).scales.astype(jnp.float32))
        self.gains = Trained(jnp.zeros(self.start.shape, jnp.float32))

    @property
    def scales(self) -> jax.Array:
        """The scales, float32 [groups, N]."""
        return self.start.get_value() * (1 + self.gains.get_value())

    def product(self, x: Any) -> jax.Array:
        """The product of x and the packed weight, with a gradient for the scales."""
        packed: Any = self.kernel.get_value()
        return matmul(x, packed, scales=self.scales)

    def terms(self, x: Any, *context: Any) -> jax.Array:
        """The product as one term [1, ..., N]."""
        return self.product(x)[None]


class MasterLinear(Linear):
    """A packed map that is rounded from a float32 master copy whenever it is used."""

    def __init__(self, packed: QuantizedTensor, weight: jax.Array):
        super().__init__(packed)
        self.master = Trained(weight.astype(jnp.float32))

    def product(self, x: Any) -> jax.Array:
        """The product of x and the packed weight, with a gradient for the master copy."""
        packed: Any = self.kernel.get_value()
        master = self.master.get_value()
        return straight_through(quantize(jax.lax.stop_gradient(master), packed.format), x, master)

    def terms(self, x: Any, *context: Any) -> jax.Array:
        """The product as one term [1, ..., N]."""
        return self.product(x)[None]


@jax.custom_vjp
def straight_through(packed: QuantizedTensor, x: jax.Array, master: jax.Array) -> jax.Array:
    """The product of x and `packed`, which is `master` rounded; its gradient is master's."""
    return matmul(x, packed)


def forward(packed: QuantizedTensor, x: jax.Array, master: jax.Array) -> tuple[jax.Array, Any]:
    """The product, and what its gradient needs."""
    return matmul(x, packed), (packed, x)


def backward(kept: Any, dy: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """The gradients for x, by the packed weight, and for the master copy."""
    packed, x = kept
    _, of_x = jax.vjp(lambda x: matmul(x, packed), x)
    of_master = jnp.einsum("...k,...n->kn", x, dy, preferred_element_type=jnp.float32)
    return None, *of_x(dy), of_master


straight_through.defvjp(forward, backward)


def make_trainer(kind: str, lm: mpjax.LanguageModel, exact: mpjax.LanguageModel) -> Decoder:
    """The packed model with trainable maps; master copies are the weights of `exact`."""
    trainer, kinds = nnx.clone(lm.model), {"scales": ScaledLinear, "master": MasterLinear}
    for place in lm.model.linear_places(lm.config):
        pairs = zip(place.kernels(lm.model), place.kernels(exact.model), strict=True)
        place.assign(trainer, [kinds[kind](packed, weight) for packed, weight in pairs])
    return trainer


def copy_weights(trainer: Decoder, lm: mpjax.LanguageModel) -> None:
    """Gives the packed model the trained scales, or the rounded master copies."""
    for place in lm.model.linear_places(lm.config):
        for own, part in zip(place.parts(lm.model), place.parts(trainer), strict=True):
            packed: Any = own.kernel.get_value()
            if isinstance(part, ScaledLinear):
                own.kernel.set_value(replace_scales(packed, part.scales))
            elif isinstance(part, MasterLinear):
                own.kernel.set_value(quantize(part.master.get_value(), packed.format))


def train(kind: str, precision: str, steps: int) -> tuple[float, float]:
    """Trains; returns the perplexity of other files before and after. kind: of RATES."""
    path = mpjax.bundled_model()
    exact = mpjax.load(path, dtype="float32", progress=False)
    lm = mpjax.load(path, precision=precision, progress=False)
    held_out = (path / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    others = [json.loads(line)["text"] for line in held_out[:2]]

    def perplexity() -> float:
        return mpjax.evaluate(lm, others, window=LENGTH, progress=False).perplexity

    before = perplexity()
    trainer = make_trainer(kind, lm, exact)
    structure, trained, frozen = nnx.split(trainer, Trained, ...)  # type: ignore[misc]
    optimizer = optax.adam(RATES[kind])

    def loss(trained: Any, tokens: jax.Array) -> jax.Array:
        return -mpjax.token_logprobs(nnx.merge(structure, trained, frozen), tokens).mean()

    @jax.jit
    def update(trained: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(trained, tokens)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            changes, state = optimizer.update(gradients, state)
        return optax.apply_updates(trained, changes), state, value

    assert lm.tokenizer is not None
    text = "".join(map(inspect.getsource, (argparse, inspect, textwrap)))
    ids = lm.tokenizer.encode(text)
    windows = np.array(ids[: len(ids) // LENGTH * LENGTH], np.int32).reshape(-1, LENGTH)
    rng, state = np.random.default_rng(0), optimizer.init(trained)
    for step in range(steps):
        trained, state, value = update(trained, state, rng.choice(windows, BATCH))
        if step % 10 == 0 or step == steps - 1:
            print(f"{kind}, step {step:3}: loss {float(value):.3f}", flush=True)
    nnx.update(trainer, trained)
    copy_weights(trainer, lm)
    return before, perplexity()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", choices=list(RATES), action="append")
    parser.add_argument("--precision", default="WNF2A32KV16")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    for kind in given.train or RATES:
        before, after = train(kind, given.precision, given.steps)
        print(f"{given.precision}, {kind}: perplexity {before:.2f} before, {after:.2f} after")

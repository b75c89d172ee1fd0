"""Fits a model to a stream of tokens: AdamW in float32, with the forward pass in 16 bits.

All steps of an interval run as one `lax.scan` in one `jit`, with the data on the device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.typing import NDArray

from examples.train_bundled_model.recipe import Recipe, TrainingError
from mpjax.models import DecoderConfig, Llama


class DivergedError(TrainingError):
    """The loss was never a finite number."""


class Windows(NamedTuple):
    """Windows of text in batches, to measure a loss.

    tokens: int32 [batches, batch, context + 1]; a window's last token is the next window's first.
    weights: float32 [batches, batch, context]: 1 for a predicted token, 0 for padding.
    """

    tokens: jax.Array
    weights: jax.Array


class Progress(NamedTuple):
    """Losses (nats per token) and speed of one interval of training, for the log and the record."""

    step: int
    train_loss: float
    validation_loss: float
    tokens_per_second: float


class State(NamedTuple):
    """The carry of the training loop: the model (float32) and AdamW's moments."""

    model: Llama
    moments: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """The model after the interval with the lowest validation loss, and all intervals."""

    recipe: Recipe
    model: Llama
    best: Progress
    course: tuple[Progress, ...]
    seconds: float


def train(
    recipe: Recipe,
    config: DecoderConfig,
    tokens: NDArray[np.uint16],
    validation: NDArray[np.uint16],
    log: Callable[[str], None] = print,
) -> Result:
    """Fits a new model of `config` to the stream `tokens`; keeps the best by validation loss.

    The same seed gives the same initial weights, order of windows and noise. Results are equal
    bit for bit on a CPU; a GPU adds up some gradients in an order that varies.

    Raises TrainingError if the training text is shorter than a window, and DivergedError.
    """
    started = time.perf_counter()
    float32 = dataclasses.replace(config, dtype="float32")
    model = Llama(float32, nnx.Rngs(recipe.seed))
    state = State(model, _optimizer(0.0, 0.0).init(model))
    looks = windows(validation, recipe.context, recipe.batch)
    starts = training_starts(recipe, len(tokens))
    rates = learning_rates(recipe)
    keys = jax.random.split(jax.random.key(recipe.seed), recipe.steps)
    data = jnp.asarray(tokens)

    best: tuple[Progress, Llama] | None = None
    course = []
    for first, last in _intervals(recipe):
        begun = time.perf_counter()
        state, losses = _train_interval(
            state,
            data,
            (jnp.asarray(starts[first:last]), rates[first:last], keys[first:last]),
            jnp.float32(recipe.weight_decay),
            jnp.float32(recipe.noise),
            looks,
            context=recipe.context,
            dtype=recipe.compute_dtype,
        )
        train_loss, validation_loss = (float(loss) for loss in losses)
        speed = (last - first) * recipe.batch * recipe.context / (time.perf_counter() - begun)
        course.append(Progress(last, train_loss, validation_loss, speed))
        log(
            f"step {last:5d}/{recipe.steps}  train {train_loss:.4f}  "
            f"validation {validation_loss:.4f}  {speed:,.0f} tokens/s"
        )
        if validation_loss < (best[0].validation_loss if best else math.inf):
            best = (course[-1], state.model)
    if best is None:
        raise DivergedError(
            "training diverged: the loss was never finite; lower the learning rate "
            f"({recipe.learning_rate:g})"
        )
    return Result(recipe, best[1], best[0], tuple(course), time.perf_counter() - started)


@functools.partial(jax.jit, static_argnames="dtype")
def loss(model: Llama, looks: Windows, *, dtype: str) -> jax.Array:
    """Mean cross-entropy in nats over all tokens that `looks` predicts, computed in `dtype`."""
    model = cast(model, dtype)

    def total(batch: Windows) -> jax.Array:
        return jnp.sum(batch.weights * _cross_entropy(model, batch.tokens))

    return jnp.sum(jax.lax.map(total, looks)) / jnp.sum(looks.weights)


def cast(model: Llama, dtype: str) -> Llama:
    """The same model with all weights in `dtype`."""
    return jax.tree.map(lambda weight: weight.astype(dtype), model)


def windows(tokens: NDArray[np.uint16], context: int, batch: int) -> Windows:
    """`tokens` cut into windows without overlap, so that each but the first is predicted once."""
    count = -(-(len(tokens) - 1) // context)
    count += -count % batch
    index = np.arange(count)[:, None] * context + np.arange(context + 1)
    padded = np.zeros(count * context + 1, np.int32)
    padded[: len(tokens)] = tokens
    weights = (index[:, 1:] < len(tokens)).astype(np.float32)
    return Windows(
        jnp.asarray(padded[index].reshape(-1, batch, context + 1)),
        jnp.asarray(weights.reshape(-1, batch, context)),
    )


def training_starts(recipe: Recipe, length: int) -> NDArray[np.int32]:
    """The start of each training window in a stream of `length` tokens, int32 [steps, batch].

    Every epoch covers the whole stream in random order, with windows cut at a random offset.
    """
    if length <= recipe.context:
        raise TrainingError(
            f"the training text has {length} tokens; a window takes {recipe.context + 1}"
        )
    rng = np.random.default_rng(recipe.seed)
    needed = recipe.steps * recipe.batch
    epochs: list[NDArray[np.int64]] = []
    while sum(len(epoch) for epoch in epochs) < needed:
        last = length - 1 - recipe.context  # a window also needs the token after it
        starts = np.arange(rng.integers(min(recipe.context, last + 1)), last + 1, recipe.context)
        epochs.append(rng.permutation(starts))
    flat = np.concatenate(epochs)[:needed].astype(np.int32)
    return flat.reshape(recipe.steps, recipe.batch)


def learning_rates(recipe: Recipe) -> jax.Array:
    """The learning rate of each step, float32 [steps]; a short run warms up for a tenth of it."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=recipe.learning_rate,
        warmup_steps=min(recipe.warmup, recipe.steps // 10),
        decay_steps=recipe.steps,
        end_value=recipe.learning_rate / 10,
    )
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(schedule(jnp.arange(1, recipe.steps + 1)), jnp.float32)


@functools.partial(jax.jit, static_argnames=("context", "dtype"))
def _train_interval(
    state: State,
    data: jax.Array,
    steps: tuple[jax.Array, jax.Array, jax.Array],
    weight_decay: jax.Array,
    noise: jax.Array,
    looks: Windows,
    *,
    context: int,
    dtype: str,
) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """Runs some steps; returns the state, the mean training loss (with noise) and validation loss.

    All settings in which recipes differ are arrays, so that a sweep compiles once. steps: for each
    step the windows' starts [steps, batch], the learning rate [steps], a random key [steps].
    """

    def step(state: State, inputs: tuple[jax.Array, ...]) -> tuple[State, jax.Array]:
        starts, rate, key = inputs
        batch = data[starts[:, None] + jnp.arange(context + 1)[None]].astype(jnp.int32)
        noisy = _add_noise(key, batch, data, noise)

        def mean_loss(model: Llama) -> jax.Array:
            return jnp.mean(_cross_entropy(cast(model, dtype), batch, noisy))

        value, gradients = jax.value_and_grad(mean_loss)(state.model)
        # optax mixes Python numbers and integer counters freely.
        with jax.numpy_dtype_promotion("standard"):
            optimizer = _optimizer(rate, weight_decay)
            updates, moments = optimizer.update(gradients, state.moments, state.model)
            return State(optax.apply_updates(state.model, updates), moments), value

    state, losses = jax.lax.scan(step, state, steps)
    return state, (jnp.mean(losses), loss(state.model, looks, dtype=dtype))


def _add_noise(key: jax.Array, batch: jax.Array, data: jax.Array, share: jax.Array) -> jax.Array:
    which, where = jax.random.split(key)
    others = data[jax.random.randint(where, batch.shape, 0, len(data))].astype(batch.dtype)
    return jnp.where(jax.random.bernoulli(which, share, batch.shape), others, batch)


def _cross_entropy(model: Llama, batch: jax.Array, inputs: jax.Array | None = None) -> jax.Array:
    """The loss [batch, context] of `batch`'s next tokens; `inputs` replaces the model's input."""
    seen = batch if inputs is None else inputs
    logits = model(seen[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])


def _optimizer(
    rate: float | jax.Array, weight_decay: float | jax.Array
) -> optax.GradientTransformation:
    def matrices(model: Llama) -> Llama:
        return jax.tree.map(lambda weight: weight.ndim > 1, model)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=matrices),
    )


def _intervals(recipe: Recipe) -> Iterator[tuple[int, int]]:
    for first in range(0, recipe.steps, recipe.interval):
        yield first, min(first + recipe.interval, recipe.steps)

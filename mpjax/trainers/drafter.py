"""Trains an EAGLE-3 head for a model on texts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import positive_whole, require_documents
from mpjax.checkpoint.drafter import require_empty, write_drafter
from mpjax.kernels.checks import require_type, shown, whole_number
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder
from mpjax.models.config import ConfigError
from mpjax.models.eagle import tokens_place, with_usual_eagle
from mpjax.models.layer import DecoderLayer
from mpjax.quantization.clipping import require_optax

WARMUP = 0.05  # share of the steps in which the learning rate grows
OWN_SHARE = 0.5  # of the hidden states in later passes that are the head's own


@dataclasses.dataclass(frozen=True)
class DrafterTraining:
    """The settings of `train_drafter`.

    steps: of gradient descent (Adam, with a rate that falls linearly to 0). batch: rows in a step.
    length: tokens in a row. rate: the learning rate. passes: the number of passes over each row.
    The first reads the model's hidden states. Each later one reads, at half of the tokens, the
    states that the head has computed in the pass before, so that the head learns to continue its
    proposals. vocabulary: how many tokens the head can propose, the most frequent ones of the
    texts; None for all. layers: the numbers of the layers whose inputs the head reads; None for
    three: near both ends, and in the middle. seed: of the weights and rows.

    Raises ValueError for values of other kinds or out of range.
    """

    steps: int = 600
    batch: int = 8
    length: int = 256
    rate: float = 2e-3
    passes: int = 3
    vocabulary: int | None = None
    layers: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ["steps", "batch", "length", "passes"]
        for name in sizes + ["vocabulary"] * (self.vocabulary is not None):
            found = positive_whole(f"DrafterTraining: {name}", getattr(self, name))
            object.__setattr__(self, name, found)
        if self.layers is not None:
            object.__setattr__(self, "layers", _read_layers(self.layers))
        object.__setattr__(self, "seed", whole_number("DrafterTraining: seed", self.seed, 0))
        is_number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not is_number or not 0 < self.rate < math.inf:
            raise ValueError(
                f"DrafterTraining: rate is {shown(self.rate)}: expected a positive, finite number"
            )
        if self.length < 2:
            raise ValueError("DrafterTraining: length is 1: expected 2 or more tokens in a row")


def _read_layers(layers: Any) -> tuple[int, ...]:
    """The numbers of layers as a tuple. Raises ValueError for anything else."""
    try:
        return tuple(operator.index(layer) for layer in layers)
    except TypeError as error:
        raise ValueError(
            f"DrafterTraining: layers is {shown(layers)}: expected numbers of layers, or None"
        ) from error


def train_drafter(
    lm: LanguageModel,
    documents: Iterable[str],
    folder: str | os.PathLike[str],
    training: DrafterTraining = DrafterTraining(),
) -> list[float]:
    """Trains an EAGLE-3 head for a model, and writes it to a folder in SafeAILab's layout.

    The head is a decoder layer of the model's sizes. Its loss at a token is the cross entropy of
    its distribution and the model's, of which only the tokens of the head's vocabulary count, in
    nats. `mpjax.load(..., drafter=folder)` loads the head with the model.

    documents: texts like those that the model will write. Needs optax.

    Returns the mean loss of each step. Raises ValueError for a folder that is not empty, texts with
    less than one row of tokens, a model that is divided among devices or has a head already, layers
    or a vocabulary that the model doesn't have, and without optax.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    require_type("training", training, DrafterTraining)
    require_documents(documents)
    lm.require_one_device("training a head of")
    lm.require_no_head("training a head of")
    lm.require_predictions()
    folder = Path(os.path.realpath(Path(folder).expanduser()))
    require_empty(folder)
    rows, ids = _tokens(lm, documents, training)
    model = _with_random_head(lm.for_device, ids, training)
    return _descend(model, rows, training, folder)


def _tokens(
    lm: LanguageModel, documents: Iterable[str], training: DrafterTraining
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of tokens, int32 [rows, length], and the ids of the head's vocabulary, rising."""
    tokenizer, found = lm.require_tokenizer(), list[int]()
    for text in documents:
        require_type("a document", text, str)
        found += tokenizer.encode(text)
    count = len(found) // training.length
    if not count:
        raise ValueError(
            f"the documents have {len(found)} tokens: expected {training.length} or more, as "
            "`length` says"
        )
    size = training.vocabulary
    ids = np.arange(lm.config.vocab_size)
    if size is not None:
        if size > len(ids):
            raise ValueError(f"vocabulary is {size}: expected at most {len(ids)}, the model's")
        often = [token for token, _ in collections.Counter(found).most_common(size)]
        others = np.setdiff1d(ids, often)[: size - len(often)]
        ids = np.sort(np.concatenate([np.array(often, ids.dtype), others]))
    rows = np.array(found[: count * training.length], np.int32)
    return rows.reshape(count, training.length), ids


def _with_random_head(model: Decoder, ids: np.ndarray, training: DrafterTraining) -> Decoder:
    """The model with a random head, whose vocabulary is `ids`; the model's arrays are shared."""
    try:
        wide = with_usual_eagle(model.config, len(ids), training.layers)
    except ConfigError as error:
        raise ValueError(f"DrafterTraining: {error}") from error
    headed: Decoder = jax.tree.map(lambda array: array, model)
    headed.config = wide
    plain = dataclasses.replace(wide, dtype="float32")
    layer = DecoderLayer(plain, wide.layers[-1], nnx.Rngs(training.seed))
    headed.layers = nnx.List([*headed.layers, layer])
    headed.put_array(tokens_place(wide), jnp.asarray(ids, jnp.int32))
    return headed


def _descend(
    model: Decoder, rows: np.ndarray, training: DrafterTraining, folder: Path
) -> list[float]:
    """Trains the head of a model, and writes it; returns the losses."""
    depth = model.config.depth

    def is_trained(path: tuple[Any, ...], value: Any) -> bool:
        is_float = jnp.issubdtype(value.get_value().dtype, jnp.floating)
        return path[:2] == ("layers", depth) and bool(is_float)

    structure, head, frozen = nnx.split(model, is_trained, ...)  # type: ignore[misc]
    optimizer, dtype = require_optax("train_drafter").scale_by_adam(), model.config.dtype

    def loss(head: nnx.State, frozen: nnx.State, tokens: jax.Array, key: jax.Array) -> jax.Array:
        model: Decoder = nnx.merge(structure, _rounded(head, dtype), frozen)
        return drafter_loss(model, tokens, key, training.passes)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        carry: tuple[nnx.State, Any],
        frozen: nnx.State,
        tokens: jax.Array,
        key: jax.Array,
        rate: jax.Array,
    ) -> tuple[tuple[nnx.State, Any], jax.Array]:
        """A step of gradient descent: the next head and moments, and the loss before it."""
        head, moments = carry
        value, gradient = jax.value_and_grad(loss)(head, frozen, tokens, key)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on promotion
            updates, moments = optimizer.update(gradient, moments)
            head = jax.tree.map(lambda weight, update: weight - rate * update, head, updates)
        return (head, moments), value

    carry, losses = (head, optimizer.init(head)), []
    rng, key = np.random.default_rng(training.seed), jax.random.key(training.seed)
    warmup = max(1, round(WARMUP * training.steps))
    for number in range(training.steps):
        tokens = jnp.asarray(rows[rng.integers(0, len(rows), training.batch)])
        rate = training.rate * min((number + 1) / warmup, 1 - number / training.steps)
        own = jax.random.fold_in(key, number)
        carry, value = step(carry, frozen, tokens, own, jnp.float32(rate))
        losses.append(value)
    write_drafter(nnx.merge(structure, _rounded(carry[0], dtype), frozen), folder)
    return [float(value) for value in losses]


def _rounded(head: nnx.State, dtype: str) -> nnx.State:
    """The head's weights in the model's dtype."""
    found: nnx.State = jax.tree.map(lambda array: array.astype(dtype), head)
    return found


def drafter_loss(model: Decoder, tokens: jax.Array, key: jax.Array, passes: int) -> jax.Array:
    """The mean loss of a model's EAGLE-3 head over all passes; see `train_drafter`.

    tokens: int32 [batch, tokens]. key: of the tokens at which a pass reads the head's own states.
    """
    logits, features = jax.lax.stop_gradient(_of_model(model, tokens))
    ids = tokens_place(model.config).read(model)
    wanted = jax.nn.softmax(logits[..., ids].astype(jnp.float32))
    truth = before = _delayed(model.draft_features(features))
    total, is_read = jnp.float32(0), jnp.ones((*tokens.shape, 1), bool)
    for number in range(passes):
        found, own = model.draft_whole(tokens, before)
        each = -(wanted * jax.nn.log_softmax(found[..., ids])).sum(-1)
        # Before the first token there is no hidden state.
        counted = is_read[:, 1:, 0].astype(jnp.float32)
        total += (each[:, 1:] * counted).sum() / jnp.maximum(counted.sum(), 1)
        own_key = jax.random.fold_in(key, number)
        is_read = jax.random.bernoulli(own_key, OWN_SHARE, (*tokens.shape, 1))
        before = jnp.where(is_read, _delayed(own), truth)
    return total / passes


def _of_model(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The model's logits, and the streams that its head reads."""
    taps = list(model.config.layers[-1].attention.taps)  # type: ignore[union-attr]
    logits, captured = model.inspect(tokens, capture={"residual": taps})
    return logits, [captured["residual"][tap] for tap in taps]


def _delayed(hidden: jax.Array) -> jax.Array:
    """Hidden states [batch, tokens, hidden] of the token before each; zeros before the first."""
    return jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))

"""The target of learning: the 16-bit model (the teacher), or the next tokens of the text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.checkpoint import huggingface
from mpjax.evaluation.divergence import divergence
from mpjax.language_model import LanguageModel
from mpjax.loading import find_folder
from mpjax.models import Decoder, DecoderLayer
from mpjax.quantization.pipeline import Stream
from mpjax.quantization.text import Windows


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model without layers, and its hidden states after the last layer.

    ends: embedding, final norm and head. states: [batch, tokens, hidden] for each batch.
    """

    ends: Decoder
    states: list[np.ndarray]

    @classmethod
    def of(
        cls, source: LanguageModel | str | os.PathLike[str], batches: Sequence[Windows], dtype: str
    ) -> Teacher:
        """Runs a model over batches; a checkpoint's folder is read layer by layer.

        dtype: of the activations, for a checkpoint.
        """
        if isinstance(source, LanguageModel):
            source.require_one_device("learning from")
            source.require_no_head("learning from")
            model = source.model
            return cls._run(model, batches, lambda number: model.layers[number])
        folder: Path = find_folder(source).resolve()
        model, checkpoint, plan = huggingface.open_plain(folder, dtype)
        huggingface.fill(model, checkpoint, plan, belongs=lambda path: not _is_in_layer(path))

        def read_layer(number: int) -> DecoderLayer:
            empty = nnx.split(model.layers[number])
            huggingface.fill(
                model, checkpoint, plan, belongs=lambda path: _is_in_layer(path, number)
            )
            layer = model.layers[number]
            model.layers[number] = nnx.merge(*empty)  # frees the layer's arrays
            return layer

        return cls._run(model, batches, read_layer)

    @classmethod
    def _run(
        cls, model: Decoder, batches: Sequence[Windows], layer_of: Callable[[int], DecoderLayer]
    ) -> Teacher:
        stream = Stream.of(model, batches)
        for number in range(model.config.num_layers):
            stream.advance(layer_of(number))
        return cls(ends_of(model), stream.states)


def ends_of(model: Decoder) -> Decoder:
    """A copy of the model without layers: embedding, final norm and head."""
    layers = model.layers
    model.layers = nnx.List([])
    try:
        return nnx.clone(model)
    finally:
        model.layers = layers


def token_losses(
    ends: Decoder, states: jax.Array, teacher: Decoder | None, goal: jax.Array
) -> jax.Array:
    """The loss of each position, float32 [batch, tokens], for hidden states after the last layer.

    teacher: None for the cross-entropy −ln p of the next tokens, `goal` int32 [batch, tokens].
        Otherwise the ends of the teacher, whose hidden states are `goal` [batch, tokens, hidden],
        and the loss is the KL divergence Σ p ln(p / q) from its probabilities p.
    """
    found = jax.nn.log_softmax(ends.logits(states), axis=-1)
    if teacher is None:
        return -jnp.take_along_axis(found, goal[..., None], axis=-1)[..., 0]
    exact = jax.nn.log_softmax(teacher.logits(goal), axis=-1)
    return divergence(exact, found)


def _is_in_layer(path: str, number: int | None = None) -> bool:
    return path.startswith("layers." if number is None else f"layers.{number}.")

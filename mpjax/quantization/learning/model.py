"""Learns the scales of a whole model against its predictions (FLUTE, Guo et al. 2024, §4.2).

Backpropagation runs layer by layer with gradient checkpointing: only the hidden states between
layers are kept, and each layer is recomputed for its gradient. Equal layers share one program.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.arguments import require_documents
from mpjax.checkpoint.progress import layers_bar
from mpjax.kernels import QuantizedTensor
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models import Decoder, DecoderLayer, ExpertPlace, FusedLinear, Linear
from mpjax.models.parameters import find
from mpjax.quantization.learning.descent import Learning, descend, mean
from mpjax.quantization.learning.learned_linear import (
    Learned,
    LearnedLinear,
    pack_all,
    replace_linears,
    why_not,
)
from mpjax.quantization.learning.teacher import Teacher, ends_of, token_losses
from mpjax.quantization.pipeline import require_chain
from mpjax.quantization.text import DEFAULT_CALIBRATION, Calibration, Windows

DEFAULT_LEARNING = Learning()
LARGEST_LOSS = 0.6  # relative squared error: about 0.12 for 2 bits, 2 for permuted channels
LOGITS_BYTES = 256 << 20  # float32 logits at a time


def learn_scales(
    lm: LanguageModel,
    documents: Iterable[str],
    *,
    reference: LanguageModel | str | os.PathLike[str] | None = None,
    rechoose: bool = False,
    learning: Learning = DEFAULT_LEARNING,
    calibration: Calibration = DEFAULT_CALIBRATION,
    progress: bool | None = None,
) -> LanguageModel:
    """Learns the scales of a model's packed weights against its 16-bit version, or the text.

    The loss on the text is never above that of `lm`: the best of the start and the ends of epochs
    is returned.

    documents: the calibration text. reference: the 16-bit model, or its checkpoint's folder or hub
        id, which is read layer by layer. The loss is then the KL divergence from its predictions;
        without a reference, it is the cross-entropy of the text, as in FLUTE, so that the model
        also learns the text.
    rechoose: whether each step chooses the codes nearest to the weights of `reference`, a
        LanguageModel; only if `lm` was rounded from it by `rtn`, `range` or `clip`. Otherwise codes
        are fixed.
    learning: epochs and rate. calibration: how much of the text is used, in which windows.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.

    Raises ValueError for a model without packed weights, with packed experts, or with a format
    whose scales can't be learned; for documents without a token; and without optax.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    lm.require_one_device("learning the scales of")
    lm.require_no_head("learning the scales of")
    require_type("rechoose", rechoose, bool)
    require_type("learning", learning, Learning)
    require_type("calibration", calibration, Calibration)
    require_documents(documents)
    if rechoose and not isinstance(reference, LanguageModel):
        raise ValueError("rechoose needs the 16-bit model: pass a LanguageModel as reference")
    _check_experts(lm.model)
    require_chain(lm.config)
    model = nnx.clone(lm.model)
    batches = calibration.windows(list(documents), lm.require_tokenizer(), model.config)
    teacher = None
    if reference is not None:
        teacher = Teacher.of(reference, batches, model.config.dtype)
    latent = reference.model if rechoose and isinstance(reference, LanguageModel) else None
    _make_learned(model, learning.table, latent)
    lesson = _Lesson(model, batches, teacher)
    steps = learning.epochs * len(batches)
    with layers_bar("Learning scales of", lm.source, progress, steps, "step") as advance:
        # Copies, since the layers' variables change.
        start = [jax.tree.map(jnp.copy, nnx.state(layer, Learned)) for layer in model.layers]
        best, _ = descend(learning, start, len(batches), lesson.gradient, lesson.loss, advance)
    lesson.put(best)
    for spec, layer in zip(model.config.layers, model.layers, strict=True):
        pack_all(layer, spec.linear_paths(model.config))
    return lm.with_model(model)


def _check_experts(model: Decoder) -> None:
    """Raises ValueError for packed experts, which are not supported."""
    for place in model.linear_places(model.config):
        kernels = place.kernels(model) if isinstance(place, ExpertPlace) else []
        if any(isinstance(kernel, QuantizedTensor) for kernel in kernels):
            raise ValueError(
                f"{place.path} has experts with packed weights, whose scales are not learned: "
                "leave learning out"
            )


def _make_learned(model: Decoder, learns_table: bool, latent: Decoder | None) -> None:
    """Replaces every packed linear map of a model by a LearnedLinear."""
    count = 0
    for number, spec in enumerate(model.config.layers):
        paths = spec.linear_paths(model.config)
        weights = {path: _latent(latent, number, path) for path in paths}
        offsets = dict.fromkeys(paths, 0)

        def change(path: str, linear: Linear) -> Linear:
            nonlocal count
            kernel: Any = linear.kernel.get_value()
            weight, first = weights[path], offsets[path]  # noqa: B023 (called in this turn alone)
            offsets[path] = first + kernel.shape[1]  # noqa: B023
            if not isinstance(kernel, QuantizedTensor):
                return linear
            if reason := why_not(kernel.format):
                raise ValueError(f"the scales of {path} can't be learned: {reason}")
            count += 1
            part = None if weight is None else weight[:, first : first + kernel.shape[1]]
            if part is not None:
                _require_rounded(path, kernel, part)
            return LearnedLinear(linear, learns_table=learns_table, latent=part)

        replace_linears(model.layers[number], paths, change)
    if not count:
        raise ValueError("the model has no packed weights, whose scales could be learned")


def _require_rounded(path: str, kernel: QuantizedTensor, weight: jax.Array) -> None:
    """Raises ValueError unless a packed weight was rounded from `weight` [K, N].

    Scaling, rotating and sorting channels (as W4Ax does between gate, up and down) change a weight
    before rounding.
    """
    wide = weight.astype(jnp.float32)
    lost = float(((kernel.dequantize(jnp.float32) - wide) ** 2).sum() / (wide**2).sum())
    if lost > LARGEST_LOSS:
        raise ValueError(
            f"rechoose can't serve {path}, which was not rounded from the reference as it is, but "
            "scaled, rotated or sorted first, or from another: leave rechoose out"
        )


def _latent(model: Decoder | None, number: int, path: str) -> Any:
    """The 16-bit kernel [K, N] of a linear map, with all parts joined; None without a model."""
    node = None if model is None else find(model.layers[number], path)
    if not isinstance(node, Linear | FusedLinear):
        return None
    parts = node.parts if isinstance(node, FusedLinear) else [node]
    kernels: list[Any] = [part.kernel.get_value() for part in parts]
    if any(isinstance(kernel, QuantizedTensor) for kernel in kernels):
        raise ValueError(f"rechoose needs a reference in 16 bits: its {path} is quantised")
    return jnp.concatenate(kernels, axis=1) if len(kernels) > 1 else kernels[0]


class _Lesson:
    """The loss of a model on batches, and its gradient for the layers' Learned variables.

    Overwrites the variables of the model's layers.
    """

    def __init__(self, model: Decoder, batches: Sequence[Windows], teacher: Teacher | None):
        self.model, self.batches, self.teacher = model, batches, teacher
        self.ends = ends_of(model)
        tokens = batches[0].tokens.shape
        positions = jnp.broadcast_to(jnp.arange(tokens[1])[None], tokens)
        self.angles = model.angles_by_rope(positions)
        fitting = max(LOGITS_BYTES // (4 * tokens[0] * model.config.vocab_size), 1)
        self.chunk = min(fitting, tokens[1])

    def put(self, parameters: Any) -> None:
        """Writes the parameters into the layers."""
        for layer, state in zip(self.model.layers, parameters, strict=True):
            nnx.update(layer, state)

    def loss(self, parameters: Any) -> float:
        """The mean loss of all positions of all batches."""
        self.put(parameters)
        return mean(
            (_head_loss(self.chunk, *self._head(index), self._forward(index)[-1]), weights.sum())
            for index, weights in enumerate(map(self._weights, range(len(self.batches))))
        )

    def gradient(self, parameters: Any, index: int) -> Any:
        """The gradient of the mean loss of a batch."""
        self.put(parameters)
        states = self._forward(index)
        change = _head_gradient(self.chunk, *self._head(index), states.pop())
        found = []
        for layer in reversed(list(self.model.layers)):
            gradient, change = _backward(layer, states.pop(), self.angles, change)
            found.append(gradient)
        return found[::-1]

    def _forward(self, index: int) -> list[jax.Array]:
        """The hidden states before each layer, and after the last."""
        states = [self.model.embed(jnp.asarray(self.batches[index].tokens))]
        for layer in self.model.layers:
            states.append(_forward(layer, states[-1], self.angles))
        return states

    def _head(self, index: int) -> tuple[Any, Any, Any, Any]:
        """The arguments of `token_losses` except states, and the weight of each position."""
        if self.teacher is not None:
            goal, teacher = self.teacher.states[index], self.teacher.ends
            return self.ends, teacher, goal, self._weights(index)
        goal = np.roll(self.batches[index].tokens, -1, axis=1)
        return self.ends, None, goal, self._weights(index)

    def _weights(self, index: int) -> np.ndarray:
        """1 for counted positions, float32 [batch, tokens]; without a teacher, not the last."""
        is_real = self.batches[index].is_real
        if self.teacher is None:
            is_real = np.pad(is_real[:, 1:], ((0, 0), (0, 1)))
        return is_real.astype(np.float32)


@jax.jit
def _forward(layer: DecoderLayer, states: jax.Array, angles: dict[str, jax.Array]) -> jax.Array:
    return layer.inputs(states, angles)[0]


@jax.jit
def _backward(
    layer: DecoderLayer, states: jax.Array, angles: dict[str, jax.Array], change: jax.Array
) -> tuple[Any, jax.Array]:
    """The vector-Jacobian product of a layer: gradients of its Learned variables and its input."""
    parts: Any = nnx.split(layer, Learned, ...)
    graph, learned, rest = parts

    def run(learned: Any, states: jax.Array) -> jax.Array:
        return nnx.merge(graph, learned, rest).inputs(states, angles)[0]

    return jax.vjp(run, learned, states)[1](change)


@functools.partial(jax.jit, static_argnums=0)
def _head_loss(
    chunk: int, ends: Decoder, teacher: Any, goal: jax.Array, weights: jax.Array, states: jax.Array
) -> jax.Array:
    """The weighted sum of the losses of all positions, `chunk` positions of each row at a time."""
    missing = -states.shape[1] % chunk

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)

    def part(given: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        states, goal, weights = given
        return (token_losses(ends, states, teacher, goal) * weights).sum()

    return jax.lax.map(jax.checkpoint(part), (cut(states), cut(goal), cut(weights))).sum()


@functools.partial(jax.jit, static_argnums=0)
def _head_gradient(
    chunk: int, ends: Decoder, teacher: Any, goal: jax.Array, weights: jax.Array, states: jax.Array
) -> jax.Array:
    """The gradient of the mean loss with respect to the hidden states."""

    def loss(states: jax.Array) -> jax.Array:
        total = _head_loss(chunk, ends, teacher, goal, weights, states)
        return total / jnp.maximum(weights.sum(), 1.0)

    return jax.grad(loss)(states)

"""Quantises a model layer by layer.

A layer is read, its inputs give statistics, these give folds and codes, and the quantised layer
makes the inputs of the next. The device holds one plain layer beside the quantised ones, and one
batch of hidden states; all others are on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.kernels import PlainCodes, pack
from mpjax.kernels.quantize import why_out_of_range
from mpjax.models import Decoder, DecoderLayer, FusedLinear, Linear
from mpjax.models.config import Fold
from mpjax.models.parameters import find
from mpjax.quantization import blocks, folds
from mpjax.quantization.methods import SCALINGS, choose_codes
from mpjax.quantization.recipe import Recipe, Rule
from mpjax.quantization.statistics import Statistics
from mpjax.quantization.text import Windows

SAMPLES = 512  # inputs of each linear map whose outputs are compared


@dataclasses.dataclass
class Stream:
    """The hidden states between two layers, on the host.

    states: [batch, tokens, hidden] each. is_real: bool [batch, tokens] each; False for padding.
    angles: float32 [batch, tokens, head dim / 2], of the rotary embedding.
    """

    states: list[np.ndarray]
    is_real: list[np.ndarray]
    angles: jax.Array

    @classmethod
    def of(cls, model: Decoder, batches: Sequence[Windows]) -> Stream:
        """The hidden states before the first layer: the embeddings of tokens."""
        embedding = model.embedding.get_value()
        states = [np.asarray(_embed(embedding, windows.tokens)) for windows in batches]
        positions = jnp.broadcast_to(jnp.arange(states[0].shape[1])[None], states[0].shape[:2])
        return cls(states, [windows.is_real for windows in batches], model.angles(positions))

    def statistics(self, layer: DecoderLayer) -> dict[str, Statistics]:
        """The statistics of what each linear map of a layer reads, by paths."""
        samples = max(1, SAMPLES // len(self.states))
        found: dict[str, Statistics] | None = None
        for states, is_real in zip(self.states, self.is_real, strict=True):
            part = _statistics(layer, states, self.angles, is_real, samples)
            found = part if found is None else {name: found[name] + part[name] for name in part}
        assert found is not None
        return found

    def advance(self, layer: DecoderLayer) -> None:
        """Replaces the hidden states by those behind a layer.

        Raises ValueError if those of a real token are NaN or infinite.
        """
        for index, states in enumerate(self.states):
            states, is_finite = _advance(layer, states, self.angles, self.is_real[index])
            if not is_finite:
                raise ValueError(
                    "the hidden states are NaN or infinite: compute in bfloat16 or float32 "
                    "instead of float16, or look whether the checkpoint is damaged"
                )
            self.states[index] = np.asarray(states)


def quantize_layer(
    layer: DecoderLayer,
    found: Mapping[str, Statistics],
    rules: Mapping[str, Rule],
    places: Sequence[Fold],
) -> DecoderLayer:
    """A layer with packed kernels, from one with plain ones, which stays as it is.

    found: the statistics of what each linear map reads, by paths; empty where no rule needs them.
    rules: for each linear map, by paths. places: the folds of the layer.

    Raises ValueError for weights that are too large or too small for their format.
    """
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))  # with variables of its own
    found = dict(found)
    for fold in places:
        rule = rules[fold.target]
        if not rule.weights.is_packed:
            continue
        for name in rule.method.scalings:
            scales = SCALINGS[name](
                _wide(folds.linear_of(layer, fold.target)),
                found[fold.target],
                rule.weights,
                fold=fold,
            )
            folds.apply(layer, fold, scales)
            found[fold.target] = found[fold.target] / scales
    orders = reorder(layer, found, rules, places)
    chosen = {}
    for path, rule in rules.items():
        if rule.weights.is_packed:
            weight = _wide(folds.linear_of(layer, path))
            if path in orders:
                weight = weight[orders[path]]
            rounding = _rounding_for(path, rule, found.get(path))
            chosen[path] = choose_codes(weight, found.get(path), rule.weights, rounding)
    for path, bits in _widths(found, rules, chosen).items():
        chosen[path] = dataclasses.replace(
            chosen[path], activation_bits=bits, permutation=orders.get(path)
        )
    for path, plain in chosen.items():
        linear, packed = folds.linear_of(layer, path), pack(plain)
        if reason := why_out_of_range(_wide(linear), packed):
            raise ValueError(f"{path}: {reason}")
        bias = None if linear.bias is None else linear.bias.get_value()
        _replace(layer, path, Linear(packed, bias))
    return layer


def reorder(
    layer: DecoderLayer,
    found: dict[str, Statistics],
    rules: Mapping[str, Rule],
    places: Sequence[Fold],
) -> dict[str, jax.Array]:
    """Sorts the channels that maps with blocks read: in the statistics, and where a fold allows it.

    Returns the orders that are left to the maps themselves, by paths.
    """
    orders = {}
    elementwise = {fold.target: fold for fold in places if fold.is_elementwise}
    for path, rule in rules.items():
        if not (rule.has_blocks and rule.blocks.is_ordered and path in found):
            continue
        order = blocks.order_of(found[path])
        found[path] = blocks.permuted(found[path], order)
        if path in elementwise:
            folds.permute(layer, elementwise[path], order)
        else:
            orders[path] = order
    return orders


def _widths(
    found: Mapping[str, Statistics], rules: Mapping[str, Rule], chosen: Mapping[str, PlainCodes]
) -> dict[str, jax.Array]:
    """The bits of the activations of maps with blocks, by paths."""
    mixed = {path: rule for path, rule in rules.items() if rule.has_blocks}
    open_ = {path: rule.blocks for path, rule in mixed.items() if rule.blocks.needs_text}
    errors = {
        path: np.asarray(blocks.block_errors(chosen[path].dequantize(), found[path]))
        for path in open_
    }
    widths = {
        path: np.full(chosen[path].scales.shape[0], 8 if rule.blocks.one_in else 4, np.uint8)
        for path, rule in mixed.items()
    } | blocks.choose_widths(open_, errors)
    return {path: jnp.asarray(bits) for path, bits in widths.items()}


def quantize_decoder(
    model: Decoder,
    read_layer: Callable[[int], tuple[DecoderLayer, bool]],
    batches: Sequence[Windows],
    recipe: Recipe,
    watch: Callable[[int, DecoderLayer], None] = lambda number, layer: None,
) -> None:
    """Puts quantised layers into a model whose other parameters are there.

    read_layer: returns the layer of a number, and whether it is quantised already, in an earlier
        run; if not, its kernels are plain.
    batches: of text for the statistics; none where no method of the recipe needs them.
    watch: is called with each number and layer when it is done.

    Raises ValueError for maps that the recipe does not name, and for hidden states that are NaN or
    infinite.
    """
    stream = Stream.of(model, batches) if batches else None
    for number, spec in enumerate(model.config.layers):
        layer, is_finished = read_layer(number)
        try:
            if not is_finished:
                paths = spec.linear_paths(model.config)
                rules = {path: recipe.rule_of(f"layers.{number}.{path}") for path in paths}
                found = {} if stream is None else stream.statistics(layer)
                layer = quantize_layer(layer, found, rules, spec.folds(model.config))
            if stream is not None:  # through the last layer, too, to see what overflows
                stream.advance(layer)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
        model.layers[number] = layer
        watch(number, layer)


def _rounding_for(path: str, rule: Rule, found: Statistics | None) -> str:
    """The rounding of a rule, or `range` with a warning where the text is too short for GPTQ."""
    if rule.method.rounding != "gptq" or found is None:
        return rule.method.rounding
    channels = len(found.magnitudes)
    tokens = int(found.tokens)
    if tokens >= channels:
        return "gptq"
    warnings.warn(
        f"{path} has {channels} input channels, and the text has {tokens} tokens: GPTQ needs at "
        "least as many tokens, so that ranges are searched instead; give more text",
        stacklevel=2,
    )
    return "range"


def _wide(linear: Linear) -> jax.Array:
    kernel: Any = linear.kernel.get_value()
    return kernel.astype(jnp.float32)


def _replace(layer: DecoderLayer, path: str, linear: Linear) -> None:
    node = find(layer, path)
    if isinstance(node, FusedLinear):
        node.parts = nnx.List([linear])
        return
    parent, _, name = path.rpartition(".")
    setattr(find(layer, parent), name, linear)


@jax.jit
def _embed(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(embedding, tokens, axis=0)


# One program each for all layers that are alike.
@functools.partial(jax.jit, static_argnames="samples")
def _statistics(
    layer: DecoderLayer, states: jax.Array, angles: jax.Array, is_real: jax.Array, samples: int
) -> dict[str, Statistics]:
    _, inputs = layer.inputs(states, angles)
    return {path: Statistics.of(x, is_real, samples) for path, x in inputs.items()}


@jax.jit
def _advance(
    layer: DecoderLayer, states: jax.Array, angles: jax.Array, is_real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The next hidden states, and whether those of real tokens are finite."""
    states, _ = layer.inputs(states, angles)
    return states, (jnp.isfinite(states) | ~is_real[..., None]).all()

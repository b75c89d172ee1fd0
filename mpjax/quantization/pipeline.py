"""Quantises a model layer by layer.

Each layer is loaded, statistics of its linear maps' inputs are measured on the calibration text,
scales are folded and codes chosen, and the quantised layer computes the inputs of the next one. The
device holds the quantised layers, one 16-bit layer and one batch of hidden states; the other
batches' hidden states are on the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.checkpoint.packed_tables import packed, tables_of
from mpjax.models import Decoder, DecoderConfig, DecoderLayer, LayerSpec, Linear
from mpjax.models.maps import Fold
from mpjax.models.mlp import RoutedInputs
from mpjax.models.stack import unstack
from mpjax.quantization import blocks, folds
from mpjax.quantization.hadamard import mix_down, set_blocks
from mpjax.quantization.learning.layer import learn_layer
from mpjax.quantization.learning.learned_linear import replace_linears
from mpjax.quantization.linears import quantize_map
from mpjax.quantization.methods import SCALINGS
from mpjax.quantization.recipe import Recipe, Rule
from mpjax.quantization.rotations import rotate_layer, rotate_tables
from mpjax.quantization.scaling import Reader, of_each_expert
from mpjax.quantization.statistics import Statistics
from mpjax.quantization.text import Windows

SAMPLES = 512  # inputs kept of each linear map, as `Statistics.samples`


@dataclasses.dataclass
class Stream:
    """The hidden states between two layers, on the host.

    states: for each batch, an array [batch, tokens, hidden]. is_real: for each batch, bool
        [batch, tokens]; False for padding.
    angles: float32 [batch, tokens, head_dim / 2] for each kind of RoPE, equal for all batches.
    """

    states: list[np.ndarray]
    is_real: list[np.ndarray]
    angles: dict[str, jax.Array]

    @classmethod
    def of(cls, model: Decoder, batches: Sequence[Windows]) -> Stream:
        """The hidden states before the first layer: the token embeddings.

        Raises ValueError for a model whose layers read more than these.
        """
        require_chain(model.config)
        states = [np.asarray(model.embed(jnp.asarray(windows.tokens))) for windows in batches]
        positions = jnp.broadcast_to(jnp.arange(states[0].shape[1])[None], states[0].shape[:2])
        angles = model.angles_by_rope(positions)
        return cls(states, [windows.is_real for windows in batches], angles)

    def statistics(self, layer: DecoderLayer) -> dict[str, Statistics]:
        """The statistics of the inputs of each linear map of a layer, by its path.

        The next batch is transferred while one is computed. More batches in flight would take
        device memory and page-locked host memory.
        """
        samples = max(1, SAMPLES // len(self.states))
        found: dict[str, Statistics] | None = None
        for states, is_real in zip(self.states, self.is_real, strict=True):
            part = _statistics(layer, states, self.angles, is_real, samples)
            jax.block_until_ready(found)
            if found is None:
                found = part
                continue
            for path in found:  # one at a time: statistics of wide maps take hundreds of megabytes
                found[path] = found[path] + part.pop(path)
        assert found is not None
        return found

    def advance(self, layer: DecoderLayer) -> None:
        """Replaces the hidden states by the layer's outputs.

        Raises ValueError if the hidden states of a real token become NaN or infinite.
        """
        for index, states in enumerate(self.states):
            states, is_finite = _advance(layer, states, self.angles, self.is_real[index])
            if not is_finite:
                raise ValueError(
                    "the hidden states are NaN or infinite: compute in bfloat16 or float32 "
                    "instead of float16, or look whether the checkpoint is damaged"
                )
            self.states[index] = np.asarray(states)


def require_chain(config: DecoderConfig) -> None:
    """Raises ValueError unless each layer reads only the hidden states after its predecessor."""
    beside = [config.in_all_layers(half) for half in ("per_layer", "streams")]
    if any([*beside, *(source is not None for source in config.sources)]):
        raise ValueError(
            "the model's layers read per-layer embeddings or another layer's keys and values, with "
            "which no calibration text can run layer by layer: round to nearest instead, without "
            "methods that need text"
        )


def quantize_layer(
    layer: DecoderLayer,
    found: dict[str, Statistics],
    rules: Mapping[str, Rule],
    places: Sequence[Fold],
) -> DecoderLayer:
    """Returns a quantised copy of a 16-bit layer.

    found: the statistics of each linear map's inputs, by path; empty if no rule needs them. Entries
        are removed when used, because they can be larger than the layer. rules: the rule of each
        linear map, by path.
    places: the layer's folds.

    Raises ValueError for weights out of their format's range.
    """
    layer = nnx.clone(layer)  # folds change the copy's variables in place
    for fold in places:
        _scale(layer, found, rules, fold)
    orders = reorder(layer, found, rules, places)
    errors = {}
    for path, rule in rules.items():
        if rule.weights.is_packed:
            linear, statistics = folds.linear_of(layer, path), found.pop(path, None)
            order = orders.get(path)
            quantized = quantize_map(linear, path, rule, statistics, order)
            if rule.has_blocks and rule.blocks.needs_text:
                assert statistics is not None
                errors[path] = _block_errors(quantized, statistics, order)
            del statistics  # free them before the next map's are used
            replace_linears(layer, [path], lambda *_, found=quantized: found)
    _set_widths(layer, rules, errors)
    return layer


def _scale(
    layer: DecoderLayer, found: dict[str, Statistics], rules: Mapping[str, Rule], fold: Fold
) -> None:
    """Folds the scales of the target's method, minimising the error over all packed readers."""
    if not fold.is_linear:
        return
    linear_readers = [path for path in fold.readers if path in rules]
    packed = [path for path in linear_readers if rules[path].weights.is_packed]
    if fold.target not in packed:
        return
    for name in rules[fold.target].method.scalings:
        readers = [
            Reader(_wide(folds.linear_of(layer, path)), found[path], rules[path].weights)
            for path in packed
        ]
        if folds.is_of_experts(layer, fold):
            scales = of_each_expert(SCALINGS[name], readers[0])
        else:
            scales = SCALINGS[name](*readers, fold=fold)
        folds.apply(layer, fold, scales)
        for path in linear_readers:
            found[path] = found[path] / scales


def reorder(
    layer: DecoderLayer,
    found: dict[str, Statistics],
    rules: Mapping[str, Rule],
    places: Sequence[Fold],
) -> dict[str, jax.Array]:
    """Sorts the input channels of maps with blocks, in the statistics and, if possible, by folds.

    Returns the orders that could not be folded, by path.
    """
    orders = {}
    folded = {fold.target: fold for fold in places if blocks.is_folded(fold)}
    for path, rule in rules.items():
        if not (rule.has_blocks and rule.blocks.is_ordered and path in found):
            continue
        fold = folded.get(path)
        order, found[path] = blocks.in_order(found[path], fold)
        if fold is not None:
            folds.permute(layer, fold, order)
        else:
            orders[path] = order
    return orders


def _set_widths(
    layer: DecoderLayer, rules: Mapping[str, Rule], errors: Mapping[str, np.ndarray]
) -> None:
    """Sets the activation widths of the packed maps with blocks.

    errors: of maps whose widths statistics choose, by path; in other maps all blocks have one
    width.
    """
    widths = blocks.choose_widths({path: rules[path].blocks for path in errors}, errors)
    for path, rule in rules.items():
        if rule.has_blocks:
            kernel: Any = folds.linear_of(layer, path).kernel
            packed = kernel.get_value()
            alike = np.full(packed.parameters.shape[:-1], 8 if rule.blocks.one_in else 4, np.uint8)
            bits = jnp.asarray(widths.get(path, alike))
            kernel.set_value(dataclasses.replace(packed, activation_bits=bits))


def quantize_decoder(
    model: Decoder,
    read_layer: Callable[[int], tuple[DecoderLayer, bool]],
    batches: Sequence[Windows],
    recipe: Recipe,
    watch: Callable[[int, DecoderLayer], None] = lambda number, layer: None,
) -> None:
    """Quantises the layers of a model, whose other parameters are already loaded.

    read_layer: index → (layer, whether an earlier run has quantised it); otherwise it is in 16
        bits.
    model: its tables are in 16 bits, and are packed as the recipe says.
    batches: the calibration text; empty if no method of the recipe needs any.
    watch: called with the index of each finished layer and the layer.

    Raises ValueError for maps without a rule, and for hidden states that are NaN or infinite.
    """
    if recipe.hadamard:
        set_blocks(model)
    if recipe.rotates:
        rotate_tables(model)
    for table, format in packed(tables_of(recipe.tables, model.config)).items():
        model.pack_table(table, format)
    stream = Stream.of(model, batches) if batches else None
    for number, spec in enumerate(model.config.layers):
        layer, is_finished = read_layer(number)
        try:
            _turn(layer, spec, model.config, recipe, is_finished)
            if not is_finished:
                paths = spec.linear_paths(model.config)
                rules = {path: recipe.rule_of(f"layers.{number}.{path}") for path in paths}
                found = {} if stream is None else stream.statistics(layer)
                plain = layer
                layer = quantize_layer(plain, found, rules, spec.folds(model.config))
                if stream is not None and (learned := learned_paths(rules)):
                    learn_layer(plain, layer, stream, learned, recipe.learning)
            if stream is not None:  # after the last layer, too, to detect overflow
                stream.advance(layer)
        except ValueError as error:
            raise ValueError(f"layer {number}: {error}") from error
        model.layers[number] = layer
        watch(number, layer)


def _turn(
    layer: DecoderLayer, spec: LayerSpec, config: DecoderConfig, recipe: Recipe, is_finished: bool
) -> None:
    """Applies the recipe's rotation and Hadamard transform to a layer, in place."""
    if recipe.rotates and not is_finished:
        rotate_layer(layer, spec, config)
    if recipe.hadamard:
        mix_down(layer, spec, is_folded=is_finished)


def learned_paths(rules: Mapping[str, Rule]) -> list[str]:
    """The paths of the packed linear maps with the step `learn`."""
    return [path for path, rule in rules.items() if rule.weights.is_packed and rule.method.learns]


def _block_errors(quantized: Linear, statistics: Statistics, order: jax.Array | None) -> np.ndarray:
    """`block_errors` of a packed map, [2, blocks], or of a stack of experts, [2, experts, blocks].

    statistics: with channels in `order`, if given.
    """
    kernel: Any = quantized.kernel.get_value()
    if len(kernel.shape) == 3:
        each = [
            _block_errors(expert, *jax.tree.map(lambda leaf, i=i: leaf[i], (statistics, order)))
            for i, expert in enumerate(unstack(quantized, kernel.shape[0]))
        ]
        return np.stack(each, 1)
    weight = kernel.dequantize()
    weight = weight if order is None else weight[order]
    return np.asarray(blocks.block_errors(weight, statistics))


def _wide(linear: Linear) -> jax.Array:
    kernel: Any = linear.kernel.get_value()
    return kernel.astype(jnp.float32)


# Compiled once for all layers of equal shapes, as `_advance` is.
@functools.partial(jax.jit, static_argnames="samples")
def _statistics(
    layer: DecoderLayer,
    states: jax.Array,
    angles: dict[str, jax.Array],
    is_real: jax.Array,
    samples: int,
) -> dict[str, Statistics]:
    _, inputs = layer.inputs(states, angles)
    return {
        path: Statistics.of_experts(x, is_real, samples)
        if isinstance(x, RoutedInputs)
        else Statistics.of(x, is_real, samples)
        for path, x in inputs.items()
    }


@jax.jit
def _advance(
    layer: DecoderLayer, states: jax.Array, angles: dict[str, jax.Array], is_real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The layer's outputs, and whether they are finite for all real tokens."""
    states, _ = layer.inputs(states, angles)
    return states, (jnp.isfinite(states) | ~is_real[..., None]).all()

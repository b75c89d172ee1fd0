"""Perplexity of W4Ax by the share of blocks in 8 bits, with and without a permutation.

python -m benchmarks.blocks             the bundled model, on Python source
python -m benchmarks.blocks FOLDER      another model, on English: the help topics of Python
python -m benchmarks.blocks planted     a random model whose layers have outliers in other channels
python -m benchmarks.blocks FOLDER --tokens 4096 --characters 8000       less text, for a CPU

Weights are rounded once for each order of channels; only the widths of blocks differ between rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from benchmarks.methods import english, python_source
from mpjax.bench import measure, tables
from mpjax.bench.random_model import random_model
from mpjax.kernels import WeightFormat, unpack
from mpjax.models import Decoder, DecoderConfig, DecoderLayer, llama_layers
from mpjax.models.maps import Fold
from mpjax.quantization.blocks import BlockRule, block_errors, choose_widths, in_order, is_folded
from mpjax.quantization.folds import linear_of
from mpjax.quantization.pipeline import Stream, quantize_layer
from mpjax.quantization.recipe import Recipe
from mpjax.quantization.statistics import Statistics
from mpjax.quantization.text import Windows

RESULTS = Path(__file__).parent / "results"
SHARES = (0, 16, 8, 4, 2, 1)  # one in this many blocks has 8 bits
CALIBRATION = mpjax.Calibration(window=512, tokens=16 * 512, batch=8)
METHOD = "range"
HELD_OUT_CHARACTERS = 20_000
ORDERS = {True: "sorted", False: "as they are"}
COLUMNS: tables.Columns = {
    "blocks in 8 bits": lambda row: f"{row['wide']:.0%}" if "wide" in row else row["precision"],
    "channels": lambda row: ORDERS[row["ordered"]] if "ordered" in row else "",
    "perplexity": "{perplexity:.3f}",
    "Δ": "{rise:+.2%}",
}
OUTLIERS, STRENGTH = 0.005, 30.0  # the share of outlier channels, and their factor
PLANTED = DecoderConfig(
    vocab_size=512,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    layers=llama_layers((None,) * 4, 2048),
    max_position_embeddings=512,
    dtype="float32",
)

# Path of a linear map in a layer → the errors of its blocks.
Errors = Mapping[str, np.ndarray]


class Measured(NamedTuple):
    """A 16-bit model, its calibration data, and how its quantised versions are measured."""

    model: Decoder
    batches: Sequence[Windows]  # for calibration
    perplexity: Callable[[Decoder], float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures a model and writes the results."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("folder", nargs="?", help="of a 16-bit checkpoint, or `planted`")
    parser.add_argument("--name", help="of the model, in the place of the folder's")
    parser.add_argument("--tokens", type=int, help="of the text for calibration")
    parser.add_argument("--characters", type=int, help="of the text that perplexity is measured on")
    given = parser.parse_args(arguments)
    name = given.name or (given.folder and Path(given.folder).name.lower())
    amounts = {
        amount: number
        for amount in ("tokens", "characters")
        if (number := getattr(given, amount)) is not None
    }
    rows = []
    for row in _rows(*measured_model(given.folder, **amounts)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(
        measure.save(
            "blocks" if name is None else f"blocks-{name}",
            {"model": name or "bundled", **amounts, "results": rows},
            RESULTS,
        )
    )


def measured_model(
    folder: str | None,
    *,
    tokens: int = CALIBRATION.tokens,
    characters: int = HELD_OUT_CHARACTERS,
) -> Measured:
    """A 16-bit model, its calibration text, and the function that measures perplexity.

    folder: of the checkpoint; None for the bundled model, `planted` for the random one.
    tokens: of the calibration text. characters: of the held-out text. The random model has its own
        texts.
    """
    if folder == "planted":
        return _planted()
    text, held_out = python_source() if folder is None else english()
    held_out = [each[:characters] for each in held_out]
    source = mpjax.bundled_model() if folder is None else Path(folder)
    base = mpjax.load(source, precision="A16KV16", progress=False)
    calibration = dataclasses.replace(CALIBRATION, tokens=tokens)
    batches = calibration.windows(text, base.require_tokenizer(), base.config)

    def measured(model: Decoder) -> float:
        lm = dataclasses.replace(base, model=model)
        found = mpjax.evaluate(lm, held_out, window=calibration.window, progress=False)
        return found.perplexity

    return Measured(base.model, batches, measured)


def _planted() -> Measured:
    """The random model with outliers; its loss is relative to its own 16-bit predictions."""
    model = planted_model(PLANTED)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, PLANTED.vocab_size, (3, 8, 128)).astype(np.int32)
    batches = [Windows(each, np.ones(each.shape, bool)) for each in tokens[:2]]
    exact = jax.nn.softmax(model(tokens[2]), -1)

    def measured(model: Decoder) -> float:
        """The perplexity relative to the exact model's predictions: exp of the cross entropy."""
        return float(jnp.exp(-(exact * jax.nn.log_softmax(model(tokens[2]), -1)).sum(-1).mean()))

    return Measured(model, batches, measured)


def planted_model(config: DecoderConfig) -> Decoder:
    """A random model with a few outlier channels, different in each layer, STRENGTH times as large.

    Outliers are in the outputs of both norms, in the values and in the up projection.
    """
    model = random_model(Decoder, config, None)
    rng = np.random.default_rng(1)

    def strong(size: int) -> jax.Array:
        factors = np.ones(size, np.float32)
        factors[rng.permutation(size)[: max(1, round(OUTLIERS * size))]] = STRENGTH
        return jnp.asarray(factors)

    for layer in model.layers:
        for norm in (layer.attention_norm, layer.mlp_norm):
            assert norm is not None  # the model has norms before its layers
            norm.weight.set_value(norm.weight.get_value() * strong(config.hidden_size))
        attention, mlp = layer.attention, layer.mlp
        assert attention is not None
        assert mlp is not None
        for fused in (attention.qkv, mlp.gate_up):
            [linear] = fused.parts
            *others, last = fused.sizes
            factors = jnp.concatenate([jnp.ones(sum(others), jnp.float32), strong(last)])
            linear.kernel.set_value(linear.kernel.get_value() * factors[None])
    assert isinstance(model.head, nnx.Param)
    model.head.set_value(model.head.get_value() * 4)  # makes predictions confident
    return model


def _rows(model: Decoder, batches: Sequence[Windows], measured: Any) -> Iterator[dict[str, Any]]:
    """A row for the 16-bit model, one for W4A8, and one for each share and order of channels."""
    plain = measured(model)

    def row(label: str, found: float, **others: Any) -> dict[str, Any]:
        return {"precision": label, "perplexity": found, "rise": found / plain - 1} | others

    yield row("W16A16", plain)
    usual = WeightFormat("uint4", 128)
    shapes = [shape for place in model.linear_places(model.config) for shape in place.shapes]
    can_split = all(usual.can_split(channels) for channels, _ in shapes)
    for label in ("W4A16" if can_split else "W4g64A16", "W4A8"):
        yield row(label, measured(rounded(model, batches, f"{label}KV16")[0]))
    for is_ordered in (True, False):
        quantized, errors = rounded(model, batches, "W4AxKV16", is_ordered=is_ordered)
        for share in SHARES:
            wide, total = set_widths(quantized, errors, share)
            yield row(
                "W4Ax", measured(quantized), one_in=share, ordered=is_ordered, wide=wide / total
            )


def rounded(
    model: Decoder, batches: Sequence[Windows], precision: str, *, is_ordered: bool = True
) -> tuple[Decoder, list[Errors]]:
    """A quantised model, and for each layer the errors of W4Ax's blocks."""
    [rule] = Recipe.of(precision, METHOD).rules
    rule = dataclasses.replace(rule, blocks=BlockRule(1, is_ordered=is_ordered))
    quantized: Decoder = nnx.merge(*nnx.split(model))
    stream, errors = Stream.of(model, batches), []
    for number, spec in enumerate(model.config.layers):
        found = stream.statistics(model.layers[number])
        rules = dict.fromkeys(spec.linear_paths(model.config), rule)
        layer = quantize_layer(model.layers[number], dict(found), rules, spec.folds(model.config))
        if rule.has_blocks:
            errors.append(_errors(layer, found, spec.folds(model.config) if is_ordered else None))
        stream.advance(layer)
        quantized.layers[number] = layer
    return quantized, errors


def _errors(
    layer: DecoderLayer, found: Mapping[str, Statistics], folds: Sequence[Fold] | None
) -> Errors:
    """The errors of a layer's blocks. folds: of the layer if channels are sorted, else None."""
    errors = {}
    for path, statistics in found.items():
        if folds is not None:
            own = (fold for fold in folds if fold.target == path and is_folded(fold))
            _, statistics = in_order(statistics, next(own, None))
        plain: Any = unpack(linear_of(layer, path).kernel.get_value())
        weight = dataclasses.replace(plain, permutation=None).dequantize()
        errors[path] = np.asarray(block_errors(weight, statistics))
    return errors


def set_widths(model: Decoder, errors: Sequence[Errors], share: int) -> tuple[int, int]:
    """Sets the widths of a model's blocks; returns the numbers of 8-bit and of all blocks."""
    wide = total = 0
    for layer, found in zip(model.layers, errors, strict=True):
        for path, bits in choose_widths(dict.fromkeys(found, BlockRule(share)), found).items():
            kernel: Any = linear_of(layer, path).kernel
            packed = dataclasses.replace(kernel.get_value(), activation_bits=jnp.asarray(bits))
            kernel.set_value(packed)
            wide, total = wide + int((bits == 8).sum()), total + len(bits)
    return wide, total


if __name__ == "__main__":
    main()

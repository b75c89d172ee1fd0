"""Perplexity with and without an online rotation of the inputs of the down projection.

python -m benchmarks.online_rotation           the bundled model, on Python source
python -m benchmarks.online_rotation FOLDER    another model, on English: the help topics of Python

QuaRot's R4 (Ashkboos et al. 2024, §4.2) multiplies what the down projection reads by a Hadamard
matrix in every step. Here it is a product in float32, so that only its quality is measured, and its
time is not. Scales of channels can't be folded between up and down where a rotation lies. Models
are read layer by layer, which takes a CPU less time to compile than whole models do.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from benchmarks import methods
from benchmarks.methods import english, possible, python_source
from mpjax.bench import measure
from mpjax.kernels import quantize_rows
from mpjax.models import Decoder, GatedMLP, GatedMLPSpec
from mpjax.models.config import DecoderConfig, Fold
from mpjax.models.layers import Activations, Rounding
from mpjax.quantization.learning.teacher import ends_of, token_losses
from mpjax.quantization.pipeline import Stream
from mpjax.quantization.rotations import rotation
from mpjax.quantization.text import Windows, windows_of

RESULTS = Path(__file__).parent / "results"
CASES = {
    "W4A8KV16": ("gptq", "os+gptq", "rotate+gptq", "rotate+os+gptq"),
    "W4AxKV16": ("gptq", "rotate+gptq"),
    "W4A4KV16": ("gptq", "rotate+gptq"),
}
CALIBRATION = mpjax.Calibration(window=512, tokens=12 * 512, batch=4)
HELD_OUT_TOKENS = 16 * 512
SEED = 3
PRECISION = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class TurnedMLPSpec(GatedMLPSpec):
    """Spec of a gated MLP whose down projection reads rotated channels."""

    kind: ClassVar[str] = "turned"

    def build(self, config: DecoderConfig, rngs: nnx.Rngs) -> TurnedMLP:
        """A TurnedMLP with random weights."""
        return TurnedMLP(config, self, rngs)

    def folds(self, config: DecoderConfig) -> tuple[Fold, ...]:
        """None: a rotation mixes the channels of up."""
        return ()


class TurnedMLP(GatedMLP):
    """The MLP down(activation(gate(x)) · up(x) · turn), with an orthogonal matrix `turn`."""

    def __init__(self, config: DecoderConfig, spec: GatedMLPSpec, rngs: nnx.Rngs):
        super().__init__(config, spec, rngs)
        self.turn = nnx.Param(_turn(spec.intermediate_size))

    def gated(self, x: Activations, format: Rounding | str | None = None) -> Activations:
        """The input of the down projection, rotated in float32 and then rounded to `format`."""
        inner: Any = super().gated(x)
        wide = jnp.matmul(inner.astype(jnp.float32), self.turn.get_value(), precision=PRECISION)
        turned = wide.astype(inner.dtype)
        return turned if format is None else quantize_rows(turned, format)


def with_turns(model: Decoder) -> Decoder:
    """A model that computes the same, with TurnedMLPs in the place of its gated MLPs."""
    config, layers = model.config, []
    model = nnx.clone(model)
    for layer, spec in zip(model.layers, config.layers, strict=True):
        turned = TurnedMLPSpec(**dataclasses.asdict(spec.mlp))
        layers.append(dataclasses.replace(spec, mlp=turned))
        mlp = nnx.eval_shape(lambda spec=turned: TurnedMLP(config, spec, nnx.Rngs(0)))
        mlp.turn = nnx.Param(_turn(turned.intermediate_size))
        mlp.gate_up, mlp.down = layer.mlp.gate_up, layer.mlp.down
        kernel = mlp.down.kernel
        weight = kernel.get_value()
        wide = weight.astype(jnp.float32)
        rows = jnp.matmul(mlp.turn.get_value().T, wide, precision=PRECISION)
        kernel.set_value(rows.astype(weight.dtype))
        layer.mlp = mlp
    model.config = dataclasses.replace(config, layers=tuple(layers))
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the results of a model."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("folder", nargs="?", help="of a 16-bit checkpoint")
    parser.add_argument("--precisions", help="of the rows, with commas")
    given = parser.parse_args(arguments)
    text, held_out = python_source() if given.folder is None else english()
    source = mpjax.bundled_model() if given.folder is None else Path(given.folder)
    cases = possible(CASES, source)
    if given.precisions:
        cases = {name: cases[name] for name in given.precisions.split(",")}
    rows = []
    for row in run(source, text, held_out, cases):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if not given.precisions:
        name = "online-rotation" + ("" if given.folder is None else f"-{source.name.lower()}")
        print(measure.save(name, {"model": source.name, "results": rows}, RESULTS))


def run(
    source: Path,
    text: Sequence[str],
    held_out: Sequence[str],
    cases: Mapping[str, Sequence[str]],
    calibration: mpjax.Calibration = CALIBRATION,
) -> Iterator[dict[str, Any]]:
    """A row for the 16-bit model, and two for each precision and method."""
    base = mpjax.load(source, precision="A16KV16", progress=False)
    turned = dataclasses.replace(base, model=with_turns(base.model))
    batches = windows_of(
        *(held_out, base.require_tokenizer(), base.config.vocab_size),
        window=calibration.window,
        most=HELD_OUT_TOKENS,
        batch=calibration.batch,
    )
    plain = perplexity(base.model, batches)
    yield {"precision": base.precision, "method": "", "perplexity": plain, "rise": 0.0}
    for precision, names in cases.items():
        for method in names:
            for is_turned, lm in ((False, base), (True, turned)):
                recipe = mpjax.Recipe.of(precision, method)
                lm = mpjax.quantize(lm, recipe, text, calibration=calibration, progress=False)
                found = perplexity(lm.model, batches)
                row = {"precision": precision, "method": method, "perplexity": found}
                yield row | {"rise": found / plain - 1, "online": is_turned}


def perplexity(model: Decoder, batches: Sequence[Windows]) -> float:
    """The perplexity of windows, each of which is read from an empty context."""
    stream, ends = Stream.of(model, batches), ends_of(model)
    for layer in model.layers:
        stream.advance(layer)
    total, count = 0.0, 0
    for states, (tokens, is_real) in zip(stream.states, batches, strict=True):
        losses = _losses(ends, jnp.asarray(states[:, :-1]), jnp.asarray(tokens[:, 1:]))
        total += float(np.asarray(losses)[is_real[:, 1:]].sum())
        count += int(is_real[:, 1:].sum())
    return float(np.exp(total / count))


@jax.jit
def _losses(ends: Decoder, states: jax.Array, goal: jax.Array) -> jax.Array:
    return token_losses(ends, states, None, goal)


def cells(row: dict[str, Any]) -> list[str]:
    """The texts of a row of the table, in the order of `methods.HEADERS`."""
    precision, method, *others = methods.cells(row)
    return [precision, f"{method} with R4" if row.get("online") else method, *others]


def _turn(size: int) -> jax.Array:
    return jnp.asarray(rotation(size, SEED), jnp.float32)


if __name__ == "__main__":
    main()

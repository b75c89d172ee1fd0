"""Perplexity with and without an online rotation of the inputs of the down projection.

python -m benchmarks.online_rotation           the bundled model, on Python source
python -m benchmarks.online_rotation FOLDER    another model, on English: the help topics of Python

QuaRot's R4 (Ashkboos et al. 2024, §4.2), the step `hadamard` of a method, mixes what the down
projection reads in every step; `python -m benchmarks.hadamard` measures the time. Scales of
channels can't be folded between up and down then. Models are read layer by layer, which takes a CPU
less time to compile than whole models do.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from benchmarks import methods
from benchmarks.methods import english, possible, python_source
from mpjax.bench import measure
from mpjax.models import Decoder
from mpjax.quantization.learning.teacher import ends_of, token_losses
from mpjax.quantization.pipeline import Stream
from mpjax.quantization.text import Windows, windows_of

RESULTS = Path(__file__).parent / "results"
CASES = {
    "W4A8KV16": ("gptq", "os+gptq", "rotate+gptq", "rotate+os+gptq"),
    "W4AxKV16": ("gptq", "rotate+gptq"),
    "W4A4KV16": ("gptq", "rotate+gptq"),
}
CALIBRATION = mpjax.Calibration(window=512, tokens=12 * 512, batch=4)
HELD_OUT_TOKENS = 16 * 512


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
            for is_turned in (False, True):
                recipe = mpjax.Recipe.of(precision, method)
                recipe = dataclasses.replace(recipe, hadamard=is_turned)
                lm = mpjax.quantize(base, recipe, text, calibration=calibration, progress=False)
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


if __name__ == "__main__":
    main()

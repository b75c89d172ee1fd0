"""Perplexity of W4Ax if the steps of blocks are whole multiples of one scale.

python -m benchmarks.block_steps [FOLDER]     of the models of `benchmarks.blocks`

Codes times the multiples of their blocks are int8 again, so that sums of products run through all
blocks, as those of W4A8 do, and are scaled once. No kernel rounds like this: `Steps` is an
emulation, which says what it would cost in quality.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import blocks as shares
from mpjax.bench import measure
from mpjax.kernels import activations
from mpjax.kernels.activation_blocks import BLOCK, ActivationBlocks
from mpjax.kernels.activations import NEARLY_ZERO, QuantizedActivations
from mpjax.kernels.rowwise import api, reference

SHARES = (8, 4)  # one block in so many has 8 bits
# The scales of a token, of which steps are multiples: one for each block as it is, one for the
# token, or one for each width, the larger a multiple of the smaller.
SCALES = ("block", "token", "width")
HEADERS = ("blocks in 8 bits", "scales", "perplexity", "Δ of a scale for each block")
LARGEST_RATIO = 64  # of the two scales of a token, so that sums stay in 32 bits


@dataclasses.dataclass(frozen=True)
class Steps:
    """A rounding to blocks in the place of `quantize_activations`. scales: one of SCALES."""

    scales: str

    def __call__(self, x: jax.Array, format: Any, dtype: Any = None) -> QuantizedActivations:
        """X [..., K] rounded as `format` says, with the steps of these scales if it is blocks."""
        found = activations.quantize_activations(x, format, dtype)
        if self.scales == "block" or not isinstance(format, ActivationBlocks):
            return found
        if format.permutation is not None:
            x = jnp.take(x, format.permutation, axis=-1)
        channels = x.shape[-1]
        missing = -channels % BLOCK
        wide = jnp.pad(x.astype(jnp.float32), (*((0, 0),) * (x.ndim - 1), (0, missing)))
        wide = wide.reshape(*x.shape[:-1], -1, BLOCK)
        peaks = jnp.maximum(jnp.abs(wide).max(-1), NEARLY_ZERO)
        top = jnp.broadcast_to(format.largest_codes(channels), peaks.shape)
        steps = self._steps(peaks, top == 7)
        values = jnp.clip(jnp.round(wide / steps[..., None]), -top[..., None], top[..., None])
        values = values.reshape(*x.shape[:-1], -1)[..., :channels].astype(jnp.int8)
        return dataclasses.replace(found, values=values, scales=steps)

    def _steps(self, peaks: jax.Array, is_narrow: jax.Array) -> jax.Array:
        """The steps [..., blocks] of blocks with these largest magnitudes."""
        # The codes of a narrow block are multiplied by 18 at most: 7 times 18 is an int8.
        of_narrow = jnp.where(is_narrow, peaks, 0).max(-1, keepdims=True) / (7 * 18)
        of_wide = jnp.where(is_narrow, 0, peaks).max(-1, keepdims=True) / 127
        if self.scales == "token":
            scale = of_wide = jnp.maximum(of_narrow, of_wide)
        else:
            scale = jnp.maximum(of_narrow, of_wide / LARGEST_RATIO)
        return _multiple(jnp.where(is_narrow, peaks / 7, of_wide), scale)


def _multiple(wanted: jax.Array, scale: jax.Array) -> jax.Array:
    """The least multiple of a scale that reaches a step, but for rounding errors."""
    return jnp.maximum(1, jnp.ceil(wanted / scale - 1e-3)) * scale


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the results of a model."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("folder", nargs="?", help="of a 16-bit checkpoint, or `planted`")
    folder = parser.parse_args(arguments).folder
    rows = []
    for row in run(folder):
        rows.append(row)
        print(json.dumps(row), flush=True)
    model = "bundled" if folder is None else Path(folder).name.lower()
    found = {"model": model, "results": rows}
    print(measure.save(f"block-steps-{model}", found, shares.RESULTS))


def run(folder: str | None) -> Iterator[dict[str, Any]]:
    """A row for each share of blocks in 8 bits and each of SCALES."""
    decoder, batches, measured = shares.measured_model(folder)
    quantized, errors = shares.rounded(decoder, batches, "W4AxKV16")
    for share in SHARES:
        wide, total = shares.set_widths(quantized, errors, share)
        for scales in SCALES:
            jax.clear_caches()  # compiled programs know nothing of the patch
            with (
                mock.patch.object(reference, "quantize_activations", Steps(scales)),
                mock.patch.object(api, "quantize_activations", Steps(scales)),
            ):
                yield {"wide": wide / total, "scales": scales, "perplexity": measured(quantized)}
    jax.clear_caches()


def cells(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The texts of the rows of the table, in the order of HEADERS."""
    plain = {row["wide"]: row["perplexity"] for row in rows if row["scales"] == "block"}
    for row in rows:
        found, rise = row["perplexity"], row["perplexity"] / plain[row["wide"]] - 1
        yield [f"{row['wide']:.0%}", f"of a {row['scales']}", f"{found:.3f}", f"{rise:+.2%}"]


if __name__ == "__main__":
    main()

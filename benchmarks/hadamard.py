"""Time of the gated activation with and without Hadamard's transform (QuaRot's R4), on a GPU.

python -m benchmarks.hadamard
python -m benchmarks.hadamard --channels 28672 --rows 1,64 --blocks 512,4096

Rows are those of two terms in float32 for few tokens, and of one in bfloat16 for many, as products
give them. Results are in bfloat16, or rounded for a product of `int8/int8` or W4Ax.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.bench import measure
from mpjax.kernels import ActivationBlocks, ActivationFormat, gated

RESULTS = Path(__file__).parent / "results"
FEW = 64  # tokens up to which a product has several terms
FORMATS: dict[str, Any] = {
    "16 bits": None,
    "int8": ActivationFormat.of("int8/int8"),
    "W4Ax": ActivationBlocks(),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases, and writes them."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--channels", type=_numbers, default=(12288, 28672))
    parser.add_argument("--rows", type=_numbers, default=(1, 16, 256, 2048))
    parser.add_argument("--blocks", type=_numbers, default=(128, 512, 4096))
    given = parser.parse_args(arguments)
    measure.require_gpu()
    rows = []
    for row in run(given.channels, given.rows, given.blocks):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(measure.save("hadamard", {"results": rows}, RESULTS))


def run(
    channels: Sequence[int], rows: Sequence[int], blocks: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each size and format: microseconds without a transform, and by its block."""
    for width, count, (name, format) in itertools.product(channels, rows, FORMATS.items()):
        terms = operand(count, width)
        times = {}
        for block in (None, *blocks):
            call = functools.partial(
                gated, activation="silu", dtype="bfloat16", format=format, hadamard=block
            )
            times["none" if block is None else str(block)] = measure.microseconds(call, terms)
        yield {"channels": width, "rows": count, "format": name, "microseconds": times}


def operand(rows: int, channels: int) -> jax.Array:
    """Random gate and up [terms, rows, 2 · channels], as a product of so many rows gives them."""
    splits, dtype = (2, "float32") if rows <= FEW else (1, "bfloat16")
    shape = splits, rows, 2 * channels
    return jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()

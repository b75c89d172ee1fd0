"""Time of the residual sum with the norm and with W4Ax's rounding, by one kernel and two, on a GPU.

python -m benchmarks.norms
python -m benchmarks.norms --channels 4096 --rows 1,4,8 --splits 4

Terms are float32, as products of few tokens give them, and channels come in a random order. Beside
these are the norm in bfloat16, and that of W4A8, which rounds whole rows.
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
from unittest import mock

import jax
import jax.numpy as jnp

from mpjax.bench import measure
from mpjax.kernels import ActivationBlocks, ActivationFormat, add_rms_norm, device
from mpjax.kernels.activation_blocks import BLOCK
from mpjax.kernels.rowwise import block_norm

INT8 = ActivationFormat.of("int8/int8")
RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases, and writes them."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--channels", type=_numbers, default=(4096,))
    parser.add_argument("--rows", type=_numbers, default=(1, 2, 4, 8, 16, 64))
    parser.add_argument("--splits", type=_numbers, default=(1, 4))
    given = parser.parse_args(arguments)
    measure.require_gpu()
    rows = []
    for row in run(given.channels, given.rows, given.splits):
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(measure.save("norms", {"results": rows}, RESULTS))


def run(
    channels: Sequence[int], rows: Sequence[int], splits: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """A row for each size: microseconds by the way in which the norm is rounded.

    The ways of W4Ax are `two kernels`, and `1` or `2` blocks for each program of one.
    """
    for width, count, terms in itertools.product(channels, rows, splits):
        keys = jax.random.split(jax.random.key(0), 3)
        blocks = ActivationBlocks(
            jnp.full(-(-width // BLOCK), 4, jnp.uint8),
            jax.random.permutation(keys[2], width).astype(jnp.int32),
        )
        arrays = (
            jax.random.normal(keys[0], (terms, count, width)),
            jax.random.normal(keys[1], (count, width)).astype(jnp.bfloat16),
            jnp.ones(width, jnp.bfloat16),
        )
        of_row = -(-width // BLOCK)
        # By the programs that have room, a program rounds one block or two.
        ways = {"two kernels": 0, "1": count * of_row, "2": count * -(-of_row // 2)}
        times = {
            "16 bits": measure.microseconds(_norm, *arrays),
            "int8": measure.microseconds(functools.partial(_norm, format=INT8), *arrays),
        }
        for name, programs in ways.items():
            jax.clear_caches()  # which have the kernels of another way
            with mock.patch.object(device, "multiprocessors", return_value=programs):
                rounded = functools.partial(_norm, format=blocks)
                times[name] = measure.microseconds(rounded, *arrays)
        chosen = block_norm.blocks_per_program(count, of_row)
        yield {
            "channels": width,
            "rows": count,
            "splits": terms,
            "chosen": "two kernels" if chosen is None else str(chosen),
            "microseconds": times,
        }


def _norm(terms: jax.Array, residual: jax.Array, weight: jax.Array, format: Any = None) -> Any:
    return add_rms_norm(terms, residual, weight, 1e-6, format=format)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()

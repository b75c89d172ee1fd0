"""The threshold of top-k or top-p of each row, as one operation."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_array
from mpjax.kernels.implementation import choose
from mpjax.kernels.thresholds import reference, triton

Implementation = Literal["triton", "reference"]


def threshold(
    numbers: jax.Array,
    wanted: jax.Array,
    weights: jax.Array | None = None,
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The largest number of each row such that it and all larger numbers weigh `wanted` or more.

    A sort would find it, too, but takes longer. This is a search for the number's bits, four at a
    time: each of eight rounds reads the row once, and sums the weights of the numbers that are at
    least each of 15 candidates. Weights are integers, so their sums are exact in any order, and all
    implementations find the same number.

    numbers: float32 [rows, size]. wanted: int32 [rows, 1], or one number for all rows; a row of 0
        or less is not searched. weights: int32 [rows, size], 0 or more, whose sum is below 2³¹;
        None for 1 each, for which the result is the `wanted`-th largest number.

    Returns float32 [rows, 1]: -inf for rows that are not searched, and if all weights sum to less.
    The result for a row with NaN is arbitrary. Raises ValueError for shapes or dtypes that don't
    match, and UnsupportedError, with the reason, if a requested implementation can't run.
    """
    numbers, wanted = (as_array("threshold", array) for array in (numbers, wanted))
    found = [numbers.dtype, wanted.dtype] + ([] if weights is None else [weights.dtype])
    expected = [jnp.dtype(name) for name in ("float32", "int32", "int32")][: len(found)]
    shapes = [numbers.shape] + ([] if weights is None else [weights.shape])
    if found != expected or numbers.ndim != 2 or set(shapes) != {numbers.shape}:
        raise ValueError(
            f"threshold: numbers, wanted and weights are {', '.join(map(str, found))}, and arrays "
            f"have the shapes {shapes}: expected float32, int32 and int32, and [rows, size] of "
            "numbers and weights"
        )
    column = (len(numbers), 1)
    if wanted.shape not in ((), (1,), (1, 1), column):
        raise ValueError(
            f"threshold: wanted has shape {wanted.shape}: expected {column}, or a single number"
        )
    wanted = jnp.broadcast_to(wanted, column)
    name = choose(
        "threshold",
        implementation,
        "triton" if numbers.size else "reference",
        ("triton", "reference"),
        lambda _: device.why_triton_cannot_run(),
    )
    search = triton.threshold if name == "triton" else reference.threshold
    return search(numbers, wanted, weights)

"""A norm whose result is also multiplied by a small matrix, such as a router's.

For few tokens one kernel does both: programs divide the matrix, and each repeats the norm of its
token, which is short. A decoding step of one sequence is bound by the number of its kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.invariance import is_batch_invariant, product
from mpjax.kernels.launch import Settings, launch, load_masked, store
from mpjax.kernels.rowwise import triton
from mpjax.kernels.rowwise.api import add_rms_norm

MOST_TOKENS = 8  # with more, repeating norms would cost more than a kernel
PROGRAMS = 64  # of a token, at most
# The stream [..., H], its norm [..., H], and the norm's products float32 [..., outputs].
Results = tuple[jax.Array, jax.Array, jax.Array]


def project_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    matrix: jax.Array,
    *,
    epsilon: float,
    dtype: jax.typing.DTypeLike | None = None,
) -> Results:
    """The stream and the norm of `add_rms_norm`, in 16 bits, and the norm's products.

    terms: [splits, ..., H]. residual: [..., H], or None. weight: [H]. matrix: [outputs, H], whose
    rows multiply the norm: products are float32 [..., outputs]. dtype: of stream and norm; None for
    the weight's.

    On a GPU one kernel computes all for up to MOST_TOKENS tokens. Differentiable.
    """
    apart = functools.partial(_apart, epsilon=epsilon, dtype=dtype)
    wanted = jnp.dtype(weight.dtype if dtype is None else dtype)
    tokens = terms.size // (terms.shape[0] * terms.shape[-1])
    is_half = wanted in (jnp.bfloat16, jnp.float16) and not is_batch_invariant()
    if not (is_half and 0 < tokens <= MOST_TOKENS) or device.why_triton_cannot_run() is not None:
        return apart(terms, residual, weight, matrix)
    kernel = functools.partial(projected, epsilon=epsilon, dtype=wanted)
    found: Results = with_gradients_of(apart, kernel, terms, residual, weight, matrix)
    return found


def project(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """The products float32 [..., outputs] of x [..., H] and the rows of a matrix [outputs, H]."""
    return product(x, matrix, jnp.float32, axis=1)


def _apart(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    matrix: jax.Array,
    *,
    epsilon: float,
    dtype: jax.typing.DTypeLike | None,
) -> Results:
    stream, normed = add_rms_norm(terms, residual, weight, epsilon, dtype=dtype)
    assert isinstance(normed, jax.Array)  # in 16 bits, or more
    return stream, normed, project(normed, matrix)


@functools.partial(jax.jit, static_argnames=("epsilon", "dtype", "interpret"))
def projected(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    matrix: jax.Array,
    *,
    epsilon: float,
    dtype: jnp.dtype,
    interpret: bool = False,
) -> Results:
    """`project_rms_norm` by the kernel, whose stream and norm have a dtype of 16 bits."""
    _, *shape, channels = terms.shape
    operands = triton.Terms.of(terms, residual, weight)
    rows, outputs = operands.terms.shape[1], len(matrix)
    tile, size = pl.next_power_of_2(pl.cdiv(outputs, PROGRAMS)), pl.next_power_of_2(channels)
    row = jax.ShapeDtypeStruct((rows, channels), dtype)
    found = launch(
        functools.partial(_kernel, epsilon=epsilon, tile=tile, size=size),
        (operands, matrix),
        out_shape=(row, row, jax.ShapeDtypeStruct((rows, outputs), jnp.float32)),
        grid=(rows, pl.cdiv(outputs, tile)),
        settings=Settings("project_rms_norm", warps=triton.warps_of(channels)),
        interpret=interpret,
    )
    stream, normed, products = (array.reshape(*shape, array.shape[-1]) for array in found)
    return stream, normed, products


def _kernel(
    inputs: tuple[triton.Terms, Any],
    stream_ref: Any,
    normed_ref: Any,
    products_ref: Any,
    *,
    epsilon: float,
    tile: int,
    size: int,
) -> None:
    operands, matrix_ref = inputs
    row, channel, mask = place = triton.row_of(operands.terms.shape[2], size)
    part, outputs = pl.program_id(1), matrix_ref.shape[0]
    output = part * tile + jnp.arange(tile)
    is_inside = (output < outputs)[:, None]
    if mask is not None:
        is_inside &= mask[None, :]
    # Loaded first, so that these loads overlap with the norm.
    matrix = load_masked(matrix_ref.at[output[:, None], channel[None, :]], is_inside)
    stream, weight = triton.stream_of(operands, place, stream_ref.dtype)
    normed = triton.normed(stream, weight, operands, epsilon).astype(normed_ref.dtype)
    if mask is not None:
        normed = jnp.where(mask, normed, jnp.zeros((), normed.dtype))
    products = (matrix.astype(jnp.float32) * normed.astype(jnp.float32)[None, :]).sum(1)
    store(products_ref.at[row, output], products, mask=output < outputs)

    @pl.when(part == 0)
    def _() -> None:
        store(stream_ref.at[row, channel], stream, mask=mask)
        store(normed_ref.at[row, channel], normed, mask=mask)

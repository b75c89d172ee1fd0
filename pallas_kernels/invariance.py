"""Batch invariance: a row's result is the same to the bit, whichever rows are computed beside it.

The order in which a sum is added, and so its rounding, mostly depends on the number of rows, which
decides the tiles of a product, the splits of K, and the splits of a sequence's keys. In a context
of `batch_invariant` these depend on nothing but the weight and the position of a token (He et al.,
"Defeating Nondeterminism in LLM Inference", 2025).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import require_type
from mpjax.kernels.gradients import with_gradients_of

# Rows of a product that XLA computes in this mode. On a CPU, its library multiplies 8 columns of
# float32 at a time, and the remaining ones by other code. On a GPU, products of GPU_ROWS rows
# take no longer than reading the matrix.
CPU_ROWS, GPU_ROWS = 8, 64
LEAST_OUTPUTS = 16
_is_invariant = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Operations that are traced in this context are batch invariant, in this thread.

    wanted: False ends the mode of an outer context. Compiled programs keep their mode, and `jit`
    traces a function anew in the other mode. Raises ValueError for another type.
    """
    require_type("batch_invariant: wanted", wanted, bool)
    with _is_invariant(wanted):
        yield


def is_batch_invariant() -> bool:
    """Whether operations are traced in a context of `batch_invariant`."""
    return bool(_is_invariant.value)


def in_row_tiles(function: Callable[..., jax.Array], x: jax.Array, *others: jax.Array) -> jax.Array:
    """The result [..., any] of a function of rows x [..., K], each row by itself.

    function: of x and the others; returns [..., any] and is differentiable. In a
        batch-invariant context it is called for tiles of a fixed number of rows, and XLA fuses
        nothing else into it, so that every call runs the same code. Otherwise this is a plain call.
    """
    if not is_batch_invariant() or not x.size:
        return function(x, *others)
    rows = x.reshape(-1, x.shape[-1])
    found = with_gradients_of(function, functools.partial(_tiled, function), rows, *others)
    return found.reshape(*x.shape[:-1], *found.shape[1:])


def _tiled(function: Callable[..., jax.Array], rows: jax.Array, *others: jax.Array) -> jax.Array:
    size = GPU_ROWS if device.on_gpu() else CPU_ROWS
    tiles = jnp.pad(rows, ((0, -len(rows) % size), (0, 0))).reshape(-1, size, rows.shape[1])

    def alone(tile: jax.Array) -> jax.Array:
        found = function(jax.lax.optimization_barrier(tile), *others)
        return jax.lax.optimization_barrier(found)

    if device.on_gpu():
        found = alone(tiles[0])[None] if len(tiles) == 1 else jax.lax.map(alone, tiles)
    else:
        # XLA would unroll a short loop of known length, and compile its steps in other ways.
        result = jax.eval_shape(alone, tiles[0])
        found = jax.lax.fori_loop(
            0,
            jax.lax.optimization_barrier(jnp.int32(len(tiles))),
            lambda index, found: found.at[index].set(alone(tiles[index])),
            jnp.zeros((len(tiles), *result.shape), result.dtype),
        )
    return found.reshape(-1, *found.shape[2:])[: len(rows)]


def product(
    x: jax.Array, matrix: jax.Array, dtype: jax.typing.DTypeLike | None, *, axis: int = 0
) -> jax.Array:
    """The product [..., N] of x [..., K] and a plain matrix [K, N], or [N, K] with axis 1.

    dtype: of the product; None for that of `jnp.dot`. In a batch-invariant context sums are
    float32, and a CPU multiplies 16-bit operands in float32, as a model that was decoded does.
    """
    if not is_batch_invariant() or not jnp.issubdtype(x.dtype, jnp.floating):
        axes = "...k,nk->...n" if axis else "...k,kn->...n"
        return jnp.einsum(axes, x, matrix, preferred_element_type=dtype)
    wanted = jnp.result_type(x, matrix) if dtype is None else dtype
    if not device.on_gpu():
        x, matrix = x.astype(jnp.float32), matrix.astype(jnp.float32)

    def multiply(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        # If the matrix were transposed first, some programs would multiply it by other code.
        dimensions = ((1,), (axis,)), ((), ())
        return jax.lax.dot_general(rows, matrix, dimensions, preferred_element_type=jnp.float32)

    # With few outputs, a CPU's library runs code whose result depends on a row's index in its tile.
    outputs = matrix.shape[1 - axis]
    padding = [(0, 0), (0, 0)]
    padding[1 - axis] = (0, max(0, LEAST_OUTPUTS - outputs))
    found = in_row_tiles(multiply, x, jnp.pad(matrix, padding) if padding[1 - axis][1] else matrix)
    return found[..., :outputs].astype(wanted)

"""The low-rank change of products by each row's adapter, as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_array, as_arrays, require_floats, shown
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.low_rank import reference, triton
from mpjax.kernels.sums.api import sum_over_devices

Implementation = Literal["triton", "reference"]


def add_low_rank(
    terms: jax.Array,
    x: jax.Array,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    axis: str | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Adds x · down · up of each row's adapter to terms of products.

    terms: [splits, ..., N], whose sum over the first axis is the product of x and the base's maps.
        The change is added to the first term, in float32, and rounded to its dtype; on a GPU in
        place, if the buffer is free. x: [..., K].
    down: [places, K, maps · rank], the first factors of all maps side by side. ups: for each map
        [places, rank, outputs], with the maps' outputs concatenated in N.
    adapters: int32 [...], the adapter of each row, from 1; 0 for rows without a change.
    axis: the mesh axis over which the products with `down` are summed, if K is divided; else None.
    implementation: `triton`, one or two kernels on a CUDA GPU of compute capability 8.0 or more,
        for x and factors in bfloat16 or float16 of one dtype; or `reference`, the grouped product.
        By default the kernels if they can run.

    Returns terms of the same shape and dtype. Differentiable in reverse. Raises ValueError for
    shapes and dtypes that don't fit, and UnsupportedError, with the reason, if a forced
    implementation can't run.
    """
    terms, x, down, adapters = as_arrays(
        "add_low_rank", terms=terms, x=x, down=down, adapters=adapters
    )
    if not isinstance(ups, Sequence):
        raise ValueError(
            f"add_low_rank: ups is {shown(ups)}: expected a list, of each map an array"
        )
    if axis is not None and not isinstance(axis, str):
        raise ValueError(f"add_low_rank: axis is {shown(axis)}: expected the name of a mesh axis")
    ups = tuple(as_array("add_low_rank: ups", up) for up in ups)
    require_floats("add_low_rank", terms=terms, x=x, down=down)
    _check(terms, x, down, ups, adapters)
    name = choose(
        "add_low_rank",
        implementation,
        "triton" if terms.size and x.size and not is_batch_invariant() else "reference",
        ("triton", "reference"),
        lambda _: _why_not(x, down, ups),
    )
    if is_batch_invariant() and len(terms) > 1:  # their number may depend on the number of rows
        terms = terms.sum(0, keepdims=True)
    rows, own = x.reshape(-1, x.shape[-1]), adapters.reshape(-1).astype(jnp.int32)
    flat = terms.reshape(len(terms), -1, terms.shape[-1])
    if name == "triton" and axis is None and triton.repeats(rows, down, ups):
        whole = with_gradients_of(reference.add, triton.add, flat, rows, down, ups, own)
        return whole.reshape(terms.shape)  # type: ignore[no-any-return]
    if name == "reference":
        inner = reference.shrink(rows, down, own)[None]
    else:
        inner = with_gradients_of(reference.shrink, triton.shrink, rows, down, own)
    if axis is not None:
        inner = sum_over_devices(inner, axis)
    if name == "reference":
        return reference.expand(flat, inner, ups, own).reshape(terms.shape)
    found = with_gradients_of(reference.expand, triton.expand, flat, inner, ups, own)
    return found.reshape(terms.shape)  # type: ignore[no-any-return]


def _check(
    terms: jax.Array,
    x: jax.Array,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
) -> None:
    """Raises ValueError as documented in `add_low_rank`."""
    shapes = [array.shape for array in (terms, x, down, adapters, *ups)]
    fit = (
        terms.ndim == x.ndim + 1
        and terms.shape[1:-1] == x.shape[:-1] == adapters.shape
        and down.ndim == 3
        and down.shape[1] == x.shape[-1]
        and bool(ups)
        and all(up.ndim == 3 for up in ups)
        and {up.shape[:2] for up in ups} == {(len(down), down.shape[2] // max(1, len(ups)))}
        and down.shape[2] % len(ups) == 0
        and sum(up.shape[2] for up in ups) == terms.shape[-1]
    )
    are_floats = all(jnp.issubdtype(up.dtype, jnp.floating) for up in ups)
    if not (fit and are_floats and jnp.issubdtype(adapters.dtype, jnp.integer)):
        raise ValueError(
            f"add_low_rank: terms, x, down, adapters and ups have the shapes {shapes}, and "
            f"adapters are {adapters.dtype}: expected [splits, ..., N], [..., K], "
            "[places, K, maps · rank], integers [...] and for each map [places, rank, outputs], "
            "with N outputs in all"
        )


def _why_not(x: jax.Array, down: jax.Array, ups: Sequence[jax.Array]) -> str | None:
    """The reason why the kernels can't run, or None if they can."""
    dtypes = {x.dtype, down.dtype, *(up.dtype for up in ups)}
    if len(dtypes) > 1 or x.dtype not in (jnp.bfloat16, jnp.float16):
        names = ", ".join(sorted(map(str, dtypes)))
        return f"x and the factors are {names}: expected one dtype, bfloat16 or float16"
    return device.why_triton_cannot_run()

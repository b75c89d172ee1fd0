"""The low-rank change of products by each row's adapter, as one operation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_array, as_arrays, require_floats, shown
from mpjax.kernels.gemm import api as gemm
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.low_rank import gate, reference, triton
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.rowwise.api import gated
from mpjax.kernels.rowwise.reference import ACTIVATIONS
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
    implementation: `triton`, two kernels on a CUDA GPU of compute capability 8.0 or more,
        for x and factors in bfloat16 or float16 of one dtype; or `reference`, the grouped product.
        By default the kernels if they can run.

    Returns terms of the same shape and dtype. Differentiable in reverse. Raises ValueError for
    shapes and dtypes that don't fit, and UnsupportedError, with the reason, if a forced
    implementation can't run.
    """
    terms, x, down, adapters = as_arrays(
        "add_low_rank", terms=terms, x=x, down=down, adapters=adapters
    )
    ups = _maps("add_low_rank", ups)
    if axis is not None and not isinstance(axis, str):
        raise ValueError(f"add_low_rank: axis is {shown(axis)}: expected the name of a mesh axis")
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


def matmul_low_rank_terms(
    x: jax.Array,
    weight: QuantizedTensor,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    axis: str | None = None,
) -> jax.Array:
    """Terms [splits, ..., N] of x · weight (`matmul_terms`), with the change of `add_low_rank`.

    x: [..., K]. weight: [K, N]. Other arguments, derivatives and errors are as for `add_low_rank`.
    On a GPU, x · down of few rows is computed by programs in the launch of the product.
    """
    x, down, adapters = as_arrays("matmul_low_rank_terms", x=x, down=down, adapters=adapters)
    ups = _maps("matmul_low_rank_terms", ups)
    if not _runs_beside(x, weight, down, ups, axis):
        return add_low_rank(gemm.matmul_terms(x, weight), x, down, ups, adapters, axis=axis)
    outputs = *x.shape[:-1], weight.shape[1]
    _check(jax.ShapeDtypeStruct((1, *outputs), x.dtype), x, down, ups, adapters)
    arrays = x.reshape(-1, x.shape[-1]), weight, down, ups, adapters.reshape(-1)
    found = with_gradients_of(_apart, _beside, *arrays)
    return found.reshape(-1, *outputs)  # type: ignore[no-any-return]


def gated_low_rank(
    x: jax.Array,
    weight: QuantizedTensor,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    activation: str,
) -> jax.Array:
    """activation(gate) · up [..., I] of gate and up from `matmul_low_rank_terms`, in x's dtype.

    activation: as for `gated`. weight: [K, 2 · I]. ups: of gate and up [places, rank, I]. Other
    arguments, derivatives and errors are as for `matmul_low_rank_terms`. On a GPU the kernel of the
    activation adds the changes.
    """
    x, down, adapters = as_arrays("gated_low_rank", x=x, down=down, adapters=adapters)
    ups = _maps("gated_low_rank", ups)
    is_known = isinstance(activation, str) and activation in ACTIVATIONS
    if not is_known or len(ups) != 2 or ups[0].shape != ups[1].shape:
        raise ValueError(
            f"gated_low_rank: the activation is {shown(activation)}, and ups have the shapes "
            f"{[up.shape for up in ups]}: expected {' or '.join(ACTIVATIONS)}, and two equal shapes"
        )
    is_run = isinstance(weight, QuantizedTensor) and x.size and not is_batch_invariant()
    if not is_run or _why_not(x, down, ups) is not None:
        terms = matmul_low_rank_terms(x, weight, down, ups, adapters)
        return gated(terms, activation, dtype=x.dtype)  # type: ignore[return-value]
    outputs = *x.shape[:-1], weight.shape[-1]
    _check(jax.ShapeDtypeStruct((1, *outputs), x.dtype), x, down, ups, adapters)
    arrays = x.reshape(-1, x.shape[-1]), weight, down, ups, adapters.reshape(-1)
    whole, kernels = (
        functools.partial(function, activation=activation)
        for function in (_gated_apart, _gated_in_kernels)
    )
    found = with_gradients_of(whole, kernels, *arrays)
    return found.reshape(*x.shape[:-1], -1)  # type: ignore[no-any-return]


def _gated_apart(*arrays: Any, activation: str) -> Any:
    """The activation by separate kernels, for the arguments of `_apart`."""
    return gated(_apart(*arrays), activation, dtype=arrays[0].dtype)


def _gated_in_kernels(
    rows: jax.Array,
    weight: QuantizedTensor,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
    *,
    activation: str,
) -> jax.Array:
    """The activation whose kernel adds the changes to the terms."""
    adapters = adapters.astype(jnp.int32)
    if _runs_beside(rows, weight, down, ups, None):
        first = triton.Shrink.of(rows, down, adapters)
        terms, inner = gemm.matmul_terms_beside(rows, weight, first)
    else:
        terms, inner = gemm.matmul_terms(rows, weight), triton.shrink(rows, down, adapters)
    found: jax.Array = gate.gated(terms, inner, ups, adapters, activation=activation)
    return found


def _maps(operation: str, ups: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The second factors as arrays. Raises ValueError for what is no list of arrays."""
    if not isinstance(ups, Sequence):
        raise ValueError(f"{operation}: ups is {shown(ups)}: expected a list, of each map an array")
    return tuple(as_array(f"{operation}: ups", up) for up in ups)


def _runs_beside(
    x: jax.Array,
    weight: QuantizedTensor,
    down: jax.Array,
    ups: Sequence[jax.Array],
    axis: str | None,
) -> bool:
    """Whether x · down can be computed in the launch of x · weight; false if they don't fit."""
    fits = isinstance(weight, QuantizedTensor) and x.shape[-1:] == weight.shape[:1]
    if not fits or len(weight.shape) != 2 or axis is not None or is_batch_invariant():
        return False
    rows = x.reshape(-1, x.shape[-1])
    is_run = _why_not(x, down, ups) is None and len(rows) <= triton.FEW_ROWS
    return is_run and gemm.can_run_beside(rows, weight)


def _apart(
    rows: jax.Array,
    weight: QuantizedTensor,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
) -> jax.Array:
    """The terms by separate kernels."""
    return add_low_rank(gemm.matmul_terms(rows, weight), rows, down, ups, adapters)


def _beside(
    rows: jax.Array,
    weight: QuantizedTensor,
    down: jax.Array,
    ups: Sequence[jax.Array],
    adapters: jax.Array,
) -> jax.Array:
    """The terms by two kernels, the first of which computes x · weight and x · down."""
    adapters = adapters.astype(jnp.int32)
    first = triton.Shrink.of(rows, down, adapters)
    terms, inner = gemm.matmul_terms_beside(rows, weight, first)
    found: jax.Array = triton.expand(terms, inner, ups, adapters)
    return found


def _check(
    terms: jax.Array | jax.ShapeDtypeStruct,
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

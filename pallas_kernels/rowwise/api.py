"""Residual sum and norm, gated activation, rounding to 8 bits: one operation each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.activations import QuantizedActivations, quantize_activations
from mpjax.kernels.checks import (
    as_array,
    as_arrays,
    as_dtype,
    is_known,
    norm_epsilon,
    require_floats,
)
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.implementation import choose
from mpjax.kernels.product_format import ActivationFormat, ProductFormat
from mpjax.kernels.rowwise import reference, triton

Implementation = Literal["triton", "reference"]
Format = ActivationFormat | ProductFormat | WeightFormat | str


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """The norm x [..., H] / √(mean(x²) + ε) · weight [H], in float32.

    Raises ValueError for shapes that don't fit.
    """
    x, weight = as_arrays("rms_norm", x=x, weight=weight)
    if not x.ndim or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x has shape {x.shape} and the weight {weight.shape}; expected [..., H] and "
            "[H]"
        )
    if is_known(epsilon):
        epsilon = norm_epsilon("rms_norm: epsilon", epsilon)
    return reference.rms_norm(x, weight, epsilon)


def add_rms_norm(
    terms: jax.Array,
    residual: jax.Array | None,
    weight: jax.Array,
    epsilon: float,
    *,
    format: Format | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | QuantizedActivations]:
    """Adds terms to the residual stream, and normalises it: x / √(mean(x²) + ε) · weight.

    terms: [splits, ..., H], from `matmul_terms`, or any x as x[None].
    residual: [..., H], or None for none.
    weight: [H]; its dtype is that of the results.
    epsilon: a number that the kernel is compiled for; one that is traced is left to XLA.
    format: what the result becomes, an ActivationFormat, or the format of the product or weight
        that it is for, or a text of one: codes of 8 bits with one scale per token are made here;
        those with scales of groups are left to the product.

    Returns the stream x [..., H], rounded to its dtype before it is normalised, and the result.
    On the GPU one kernel reads every term once. Differentiable unless it quantises. Raises
    ValueError for shapes that don't fit, and UnsupportedError, with the reason, where a forced
    implementation can't run.
    """
    terms, weight = as_arrays("add_rms_norm", terms=terms, weight=weight)
    require_floats("add_rms_norm", terms=terms, weight=weight)
    if residual is not None:
        residual = as_array("add_rms_norm: residual", residual)
        require_floats("add_rms_norm", residual=residual)
    if (
        terms.ndim < 2
        or weight.shape != terms.shape[-1:]
        or (residual is not None and residual.shape != terms.shape[1:])
    ):
        found = None if residual is None else residual.shape
        raise ValueError(
            f"add_rms_norm: terms have shape {terms.shape}, the residual {found} and the weight "
            f"{weight.shape}; expected [splits, ..., H], [..., H] and [H]"
        )
    format = None if format is None else ActivationFormat.of(format)
    if is_known(epsilon):
        epsilon = norm_epsilon("add_rms_norm: epsilon", epsilon)
    kernel = functools.partial(triton.add_rms_norm, epsilon=epsilon, format=format)
    plain = functools.partial(reference.add_rms_norm, epsilon=epsilon, format=format)
    reason = _why_not_triton(terms, weight.dtype, format)
    if not is_known(epsilon):
        reason = "epsilon is traced, expected a Python number"
    default = "reference" if terms.size == 0 else "triton"
    if _choose("add_rms_norm", implementation, default, reason) == "reference":
        return plain(terms, residual, weight)
    return _differentiable(kernel, plain, terms, residual, weight)


def gated_silu(
    terms: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    format: Format | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QuantizedActivations:
    """SiLU(gate) · up in `dtype`, of terms [splits, ..., 2 · I] that hold gate before up.

    format: what the result becomes, as that of `add_rms_norm`; where it is quantised here, by
        default in a kernel, and else XLA makes one fusion of it as well.

    Returns [..., I]. Differentiable unless it quantises. Raises ValueError for an odd number of
    channels, and UnsupportedError, with the reason, where a forced implementation can't run.
    """
    terms = as_array("gated_silu: terms", terms)
    require_floats("gated_silu", terms=terms)
    dtype = as_dtype("gated_silu: dtype", dtype)
    if terms.ndim < 2 or terms.shape[-1] % 2:
        raise ValueError(f"gated_silu: terms have shape {terms.shape}; expected [splits, ..., 2·I]")
    format = None if format is None else ActivationFormat.of(format)
    kernel = functools.partial(triton.gated_silu, dtype=dtype, format=format)
    plain = functools.partial(reference.gated_silu, dtype=dtype, format=format)
    reason = _why_not_triton(terms, dtype, format)
    default = "triton" if terms.size and reference.quantizes(format) else "reference"
    if _choose("gated_silu", implementation, default, reason) == "reference":
        return plain(terms)
    return _differentiable(kernel, plain, terms)


def quantize_rows(
    x: jax.Array, format: Format, *, implementation: Implementation | None = None
) -> QuantizedActivations:
    """Rounds x [..., K] to what `format` says: `quantize_activations`, as one kernel.

    format: an ActivationFormat, or the format of the product or weight that x is for, or a text of
        one, such as "int8".

    Where scales belong to groups of channels, XLA's fusions do it. Raises ValueError for 16-bit
    activations, and UnsupportedError, with the reason, where a forced implementation
    can't run.
    """
    x = as_array("quantize_rows: x", x)
    require_floats("quantize_rows", x=x)
    wanted = ActivationFormat.of(format)
    default = "triton" if x.size and reference.quantizes(wanted) else "reference"
    reason = _why_not_triton(x, x.dtype, wanted)
    if not reference.quantizes(wanted):
        reason = f"{format} does not have one scale per token"
    if _choose("quantize_rows", implementation, default, reason) == "reference":
        return quantize_activations(x, format)
    return triton.quantize_rows(x, wanted)


def _choose(name: str, wanted: Implementation | None, default: str, reason: str | None) -> str:
    return choose(name, wanted, default, ("triton", "reference"), lambda _: reason)


def _why_not_triton(
    terms: jax.Array, dtype: jnp.dtype, format: ActivationFormat | None
) -> str | None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the result is {dtype}, expected bfloat16 or float16"
    if terms.size == 0:
        return "there are no rows"
    if reason := device.why_triton_cannot_run():
        return reason
    if format is not None and format.values == "float8" and (reason := device.why_not_float8()):
        return reason
    return device.why_too_large(terms.size) if reference.quantizes(format) else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    return kernel(*arguments)


def _forward(kernel: Callable[..., Any], plain: Callable[..., Any], *arguments: Any) -> Any:
    return _differentiable(kernel, plain, *arguments), arguments


def _backward(
    kernel: Callable[..., Any], plain: Callable[..., Any], saved: Any, gradients: Any
) -> Any:
    return jax.vjp(plain, *saved)[1](gradients)


_differentiable.defvjp(_forward, _backward)

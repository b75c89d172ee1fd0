"""Residual sum with norm, gated activation, and quantisation to 8 bits, each as one operation."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import Format, QuantizedActivations, quantize_activations
from mpjax.kernels.checks import (
    as_array,
    as_arrays,
    as_dtype,
    is_known,
    norm_epsilon,
    require_floats,
    shown,
    whole_number,
)
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.rowwise import block_norm, blocks, reference, triton
from mpjax.kernels.rowwise.hadamard import expected_block, transformed, why_no_room
from mpjax.kernels.rowwise.reference import Rounding
from mpjax.kernels.static_rows import StaticRows

Implementation = Literal["triton", "reference"]


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Normalises x [..., H] to x / √(mean(x²) + ε) · weight [H], in float32.

    Raises ValueError for shapes that don't match.
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
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array | QuantizedActivations]:
    """Adds terms to the residual stream, and normalises it: x / √(mean(x²) + ε) · weight.

    terms: [splits, ..., H], from `matmul_terms`, or any x as x[None].
    residual: the stream before [..., H], or None if there is none.
    weight: [H].
    epsilon: ε, a number for which the kernel is compiled; with a traced number, the reference runs.
    format: the format of the normalised rows: an ActivationFormat, the format of the next weight or
        product, a string of one of these, or the next weight's ActivationBlocks or StaticRows. Rows
        with 8 bits and one scale per token, ActivationBlocks and StaticRows are quantised here;
        rows with group scales are quantised by the product. ActivationBlocks permute the channels.
    dtype: of both results; None for the weight's.

    Returns the stream x [..., H], which is rounded to its dtype before it is normalised, and the
    normalised rows [..., H], an array or QuantizedActivations. On a GPU one kernel loads every term
    once; if it rounds to blocks, programs load terms again, or for many rows another kernel rounds.
    Differentiable unless it quantises. Raises ValueError for shapes that don't match, and
    UnsupportedError, with the reason, if a requested implementation can't run.
    """
    terms, weight = as_arrays("add_rms_norm", terms=terms, weight=weight)
    require_floats("add_rms_norm", terms=terms, weight=weight)
    residual = _residual_of(terms, residual, weight)
    rounding = None if format is None else _rounding("add_rms_norm", format, terms.shape[-1])
    if is_known(epsilon):
        epsilon = norm_epsilon("add_rms_norm: epsilon", epsilon)
    wanted = weight.dtype if dtype is None else as_dtype("add_rms_norm: dtype", dtype)
    plain = functools.partial(
        reference.add_rms_norm, epsilon=epsilon, format=rounding, dtype=wanted
    )
    reason = _why_not_triton(terms, wanted, rounding)
    if not is_known(epsilon):
        reason = "epsilon is traced, expected a Python number"
    is_plain = terms.size == 0 or isinstance(rounding, StaticRows)
    default = "reference" if is_plain else "triton"
    if _choose("add_rms_norm", implementation, default, reason) == "reference":
        return plain(terms, residual, weight)
    if isinstance(rounding, ActivationBlocks):
        return block_norm.add_rms_norm(
            terms, residual, weight, rounding, epsilon=epsilon, dtype=wanted
        )
    kernel = functools.partial(triton.add_rms_norm, epsilon=epsilon, format=rounding, dtype=wanted)
    return with_gradients_of(plain, kernel, terms, residual, weight)


def _residual_of(
    terms: jax.Array, residual: jax.Array | None, weight: jax.Array
) -> jax.Array | None:
    """The residual stream as an array. Raises ValueError if its shape doesn't fit."""
    if residual is not None:
        residual = as_array("add_rms_norm: residual", residual)
        require_floats("add_rms_norm", residual=residual)
    found = None if residual is None else residual.shape
    fits = terms.ndim >= 2 and weight.shape == terms.shape[-1:]
    if not fits or found not in (None, terms.shape[1:]):
        raise ValueError(
            f"add_rms_norm: terms have shape {terms.shape}, the residual {found} and the weight "
            f"{weight.shape}; expected [splits, ..., H], [..., H] and [H]"
        )
    return residual


def gated_silu(
    terms: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    format: Format | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QuantizedActivations:
    """SiLU(gate) · up in `dtype`; see `gated`."""
    return gated(terms, "silu", dtype=dtype, format=format, implementation=implementation)


def gated(
    terms: jax.Array,
    activation: str,
    *,
    dtype: jax.typing.DTypeLike,
    format: Format | None = None,
    hadamard: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | QuantizedActivations:
    """activation(gate) · up in `dtype`, where the sum of terms is gate and up, concatenated.

    activation: `silu`, or `gelu` (its tanh approximation, Gemma).
    terms: [splits, ..., 2 · I], from `matmul_terms`, or any x as x[None].
    format: of the result, as for `add_rms_norm`. If the result is quantised here, a kernel runs by
        default; otherwise the reference, which XLA compiles to one fusion.
    hadamard: the block size of a Hadamard transform of the result before it is rounded, a power of
        two that divides I (see `hadamard`); None for no transform. A kernel can fuse it. A result
        that is quantised blockwise, or by DividedRows or StaticRows, is converted to `dtype` before
        it is rounded.

    Returns [..., I], an array or QuantizedActivations. Differentiable unless it quantises. Raises
    ValueError for an odd number of channels or partial blocks, and UnsupportedError, with the
    reason, if a requested implementation can't run.
    """
    name = f"gated_{activation}"
    if not isinstance(activation, str) or activation not in reference.ACTIVATIONS:
        known = " or ".join(reference.ACTIVATIONS)
        raise ValueError(f"gated: activation is {shown(activation)}: expected {known}")
    terms = as_array(f"{name}: terms", terms)
    require_floats(name, terms=terms)
    dtype = as_dtype(f"{name}: dtype", dtype)
    if terms.ndim < 2 or terms.shape[-1] % 2:
        raise ValueError(f"{name}: terms have shape {terms.shape}; expected [splits, ..., 2·I]")
    rounding = None if format is None else _rounding(name, format, terms.shape[-1] // 2)
    if hadamard is not None:
        hadamard = _block(f"{name}: hadamard", hadamard, terms.shape[-1] // 2)
        if isinstance(rounding, ActivationBlocks | DividedRows | StaticRows):
            turned: Any = gated(
                terms, activation, dtype=dtype, hadamard=hadamard, implementation=implementation
            )
            return quantize_rows(turned, rounding, implementation=implementation)
    plain = functools.partial(
        reference.gated, activation=activation, dtype=dtype, format=rounding, hadamard=hadamard
    )
    reason = _why_not_triton(terms, dtype, rounding)
    if isinstance(rounding, ActivationBlocks) and activation != "silu":
        reason = f"{activation} has no kernel that rounds to blocks"
    if hadamard is not None and reason is None:
        reason = _why_no_room(terms.shape[-1] // 2, hadamard)
    default = "triton" if hadamard is not None and terms.size else _default(terms, rounding)
    if _choose(name, implementation, default, reason) == "reference":
        return plain(terms)
    if isinstance(rounding, ActivationBlocks):
        return blocks.gated_silu(terms, rounding, dtype=dtype)
    kernel = functools.partial(
        triton.gated, activation=activation, dtype=dtype, format=rounding, hadamard=hadamard
    )
    return with_gradients_of(plain, kernel, terms)


def hadamard(
    x: jax.Array,
    block: int,
    *,
    dtype: jax.typing.DTypeLike = "float32",
    implementation: Implementation | None = None,
) -> jax.Array:
    """The Hadamard transform of each block of channels of x [..., K].

    block: the number of neighbouring channels that are multiplied by Sylvester's matrix / √block: a
        power of two from 16 to 4096 that divides K. The matrix is its own inverse.
    dtype: of the result. In 16 bits a kernel computes it on a GPU; in float32 XLA's product does.

    Differentiable. Raises ValueError for another block size, and UnsupportedError, with the reason,
    if a requested implementation can't run.
    """
    x = as_array("hadamard: x", x)
    require_floats("hadamard", x=x)
    if not x.ndim:
        raise ValueError("hadamard: x is a number: expected an array [..., K]")
    block = _block("hadamard: block", block, x.shape[-1])
    wanted = as_dtype("hadamard: dtype", dtype)
    reason = _why_not_triton(x, wanted, None) or _why_no_room(x.shape[-1], block)
    default = "triton" if wanted.itemsize == 2 and x.size else "reference"

    def plain(x: jax.Array) -> jax.Array:
        return transformed(x, block).astype(wanted)

    if _choose("hadamard", implementation, default, reason) == "reference":
        return plain(x)
    kernel = functools.partial(triton.hadamard, block=block, dtype=wanted)
    return with_gradients_of(plain, kernel, x)


def quantize_rows(
    x: jax.Array, format: Format, *, implementation: Implementation | None = None
) -> QuantizedActivations:
    """Quantises x [..., K] to `format`, on a GPU in one kernel.

    Computes the same as `quantize_activations`, which runs instead if scales belong to groups of
    channels.

    format: an ActivationFormat, or the format of the product or weight that uses x, or the string
        of one, such as "int8"; or that weight's ActivationBlocks; or DividedRows or StaticRows, for
        which XLA's fusions run.

    Raises ValueError for a format with 16-bit activations, and UnsupportedError, with the reason,
    if a requested implementation can't run.
    """
    x = as_array("quantize_rows: x", x)
    require_floats("quantize_rows", x=x)
    wanted = _rounding("quantize_rows", format, x.shape[-1] if x.shape else 0)
    default = _default(x, wanted)
    reason = _why_not_triton(x, x.dtype, wanted)
    if not reference.quantizes(wanted):
        reason = f"{format} does not have one scale per token"
    if _choose("quantize_rows", implementation, default, reason) == "reference":
        return quantize_activations(x, format)
    if isinstance(wanted, ActivationBlocks):
        return blocks.quantize_rows(x, wanted)
    return triton.quantize_rows(x, wanted)


def _rounding(operation: str, format: Format, channels: int) -> Rounding:
    """How a result is rounded. Raises ValueError for blocks of another number of channels."""
    if isinstance(format, DividedRows | StaticRows):
        return format
    if isinstance(format, ActivationBlocks):
        return format.checked(operation, channels)
    return ActivationFormat.of(format)


def _block(name: str, block: Any, channels: int) -> int:
    """The argument `name`, a block size. Raises ValueError unless it divides rows of `channels`."""
    block = whole_number(name, block)
    if expected := expected_block(block, channels):
        raise ValueError(f"{name} is {block}: {expected}")
    return block


def _default(x: jax.Array, format: Rounding | None) -> str:
    """A kernel if it rounds whole rows of x; otherwise XLA's fusions."""
    is_fused = isinstance(format, DividedRows | StaticRows)
    return "triton" if x.size and reference.quantizes(format) and not is_fused else "reference"


def _choose(name: str, wanted: Implementation | None, default: str, reason: str | None) -> str:
    return choose(name, wanted, default, ("triton", "reference"), lambda _: reason)


def _why_not_triton(terms: jax.Array, dtype: jnp.dtype, format: Rounding | None) -> str | None:
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the result is {dtype}, expected bfloat16 or float16"
    if terms.size == 0:
        return "there are no rows"
    if isinstance(format, DividedRows):
        return "rows are divided among devices, whose largest magnitudes come before the rounding"
    if isinstance(format, StaticRows):
        return "a scale that is given needs no pass over the rows, and XLA's fusions round to it"
    if reason := device.why_triton_cannot_run():
        return reason
    if getattr(format, "values", None) == "float8" and (reason := device.why_not_float8()):
        return reason
    return device.why_too_large(terms.size) if reference.quantizes(format) else None


def _why_no_room(channels: int, block: int) -> str | None:
    """The reason why this GPU can't transform a row of `channels` channels, or None."""
    capability = device.compute_capability()
    return None if capability is None else why_no_room(channels, block, capability)

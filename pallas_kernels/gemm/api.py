"""The public product of activations and a weight matrix in any format."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.activations import QuantizedActivations
from mpjax.kernels.checks import as_array, as_dtype
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.gemm import dequantize, plans, reference, triton, xla
from mpjax.kernels.gemm.gradient import differentiable
from mpjax.kernels.gemm.plans import Implementation, Problem
from mpjax.kernels.gemm.plans.limits import can_be_operand
from mpjax.kernels.implementation import choose
from mpjax.kernels.invariance import is_batch_invariant, product
from mpjax.kernels.product_format import ActivationFormat, ProductFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor, with_scales
from mpjax.kernels.rowwise.api import quantize_rows
from mpjax.kernels.varying_axes import vary_alike


def matmul(
    x: jax.Array | QuantizedActivations,
    weight: jax.Array | QuantizedTensor,
    *,
    implementation: Implementation | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    scales: jax.Array | None = None,
    activations: ActivationFormat | DividedRows | str | None = None,
) -> jax.Array:
    """The product [..., N] of x [..., K] and weight [K, N], summed in float32, or int32 for int8.

    The product with a plain weight is `jnp.dot`. For a QuantizedTensor whose codes become 8-bit
    operands, x is quantised first (`quantize_activations`), unless it already is. The
    implementation is chosen for the device, the format, the shape and the number of rows, or
    forced:

    - `triton`: the fused kernel; weights stay packed in memory (TurboMind §3.4, LiquidGEMM §4,
      FLUTE §3). It takes 16-bit or quantised x, on a CUDA GPU of compute capability 8.0 or more.
    - `mosaic`: a fused kernel of warpgroups that decode while others multiply (LiquidGEMM §5.2),
      for all formats but `float8:g128/float8`, only on compute capability 9.0.
    - `dequantize`: dequantises the weight in memory, and multiplies by cuBLAS, or for `liquid4` by
      the kernel of `int8`; the fastest for many rows.
    - `xla`: XLA's own product of two 8-bit matrices, for `int8` and `float8:gK/float8`.
    - `reference`: plain jnp in float32, on any device.

    out_dtype: of the product; by default the dtype of x, or for a plain weight that of `jnp.dot`.
    scales: [groups, N] instead of the weight's own.
    activations: the format to which an array x is quantised. The default, which fits the weight's
        operand, is the only valid format (`ProductFormat`), except for its DividedRows, if x and
        the weight have only some of the input channels.

    If x is an array, the product is differentiable in reverse (grad, vjp; JAX refuses jvp and
    hessian) with respect to x, to `scales` (FLUTE's learned scales), and to the table and the
    channel scales of a weight that has them. Rounding counts as the identity.

    Raises ValueError if K differs or x does not fit the format, and UnsupportedError, with the
    reason, if a forced implementation can't run.
    """
    x, weight = _read("matmul", x, weight)
    if isinstance(weight, QuantizedTensor):
        terms = matmul_terms(
            *(x, weight),
            implementation=implementation,
            out_dtype=out_dtype,
            scales=scales,
            activations=activations,
        )
        # XLA fuses this sum, in a fixed order, into the product's consumer.
        dtype = _out_dtype(x, out_dtype)
        return (terms[0] if terms.shape[0] == 1 else terms.sum(0)).astype(dtype)
    if isinstance(x, QuantizedActivations):
        raise ValueError("matmul: x is quantised, but the weight is a plain array")
    _refuse_for_plain(scales=scales, activations=activations, implementation=implementation)
    wanted = None if out_dtype is None else _out_dtype(x, out_dtype)
    if is_batch_invariant():
        return product(x, weight, wanted)
    return jnp.dot(x, weight, preferred_element_type=wanted)


def _refuse_for_plain(implementation: str | None, **others: object) -> None:
    """Raises ValueError for arguments that are only for packed weights."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"matmul: there are {name}, but the weight is a plain array")
    if implementation is not None:
        raise ValueError(
            f"matmul: implementation is {implementation!r}, but the weight is a plain array, "
            "whose product is XLA's: leave it out"
        )


def matmul_terms(
    x: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    *,
    implementation: Implementation | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    scales: jax.Array | None = None,
    activations: ActivationFormat | DividedRows | str | None = None,
) -> jax.Array:
    """Terms [splits, ..., N] that sum to the product of `matmul`.

    Several terms are float32; a single term has the product's dtype, or is float32 in a
    batch-invariant context. They are for a consumer that
    sums them itself, as `add_rms_norm` does. Arguments and errors are as for `matmul`, but the
    weight is a QuantizedTensor. Derivatives are those of the sum.
    """
    x, weight = _read("matmul_terms", x, weight)
    if not isinstance(weight, QuantizedTensor):
        raise ValueError("matmul_terms: the weight is a plain array; use matmul")
    if scales is not None:
        scales = as_array("matmul: scales", scales)
    if not isinstance(x, QuantizedActivations) and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"matmul: x is {x.dtype}; expected floating point beside a packed weight")
    divided = activations if isinstance(activations, DividedRows) else None
    wanted = activations if not isinstance(activations, DividedRows) else activations.format
    format, dtype = ProductFormat.of(weight.format, wanted), _out_dtype(x, out_dtype)
    outputs = *x.shape[:-1], weight.shape[1]
    if 0 in x.shape:  # possible for every implementation; the choice rejects unknown names
        choose("matmul", implementation, "reference", get_args(Implementation), lambda _: None)
        return jnp.zeros((1, *outputs), dtype)
    multiply = functools.partial(
        _multiply_rows,
        format=format,
        divided=divided,
        dtype=dtype,
        implementation=implementation,
    )
    if isinstance(x, QuantizedActivations):
        if scales is not None:
            weight = with_scales(weight, scales)
        terms = multiply(_as_rows(x), weight)
    else:
        rows = x.reshape(-1, x.shape[-1])  # [M, K]
        terms = differentiable(multiply, *vary_alike((rows, weight, scales)))
    return terms.reshape(-1, *outputs)


def can_run_beside(rows: jax.Array, weight: QuantizedTensor) -> bool:
    """Whether another kernel's programs can run in the launch of rows [M, K] · weight [K, N].

    They can if Triton's kernel multiplies by default, with 16-bit activations and a single launch.
    """
    if not rows.size or ProductFormat.of(weight.format, None).activations.values:
        return False
    problem = Problem.of(rows.shape[0], weight)
    if _default(problem, rows, weight) != "triton" or _why_not("triton", rows, weight):
        return False
    return plans.triton_config_of(problem).unsplit is None


def matmul_terms_beside(
    rows: jax.Array, weight: QuantizedTensor, beside: triton.Beside
) -> tuple[jax.Array, jax.Array]:
    """Terms [splits, M, N] of `matmul_terms`, and the result of another kernel in the same launch.

    rows: [M, K], for which `can_run_beside` is true. The terms have the dtype of rows, or float32.
    """
    rows, weight = _in_packed_order(rows, weight, ProductFormat.of(weight.format, None))  # type: ignore[assignment]
    config = plans.triton_config_of(Problem.of(rows.shape[0], weight))
    found: tuple[jax.Array, jax.Array] = triton.matmul_terms(
        rows, weight, config, jnp.dtype(rows.dtype), beside
    )
    return found


def _read(operation: str, x: Any, weight: Any) -> tuple[Any, Any]:
    """Converts x and the weight to arrays, unless they are quantised.

    Raises ValueError if their shapes don't fit.
    """
    if not isinstance(x, QuantizedActivations):
        x = as_array(f"{operation}: x", x)
    if not isinstance(weight, QuantizedTensor):
        weight = as_array(f"{operation}: the weight", weight)
    for name, array, shape in (("x", x, "[..., K]"), ("the weight", weight, "[K, N]")):
        if not array.shape:
            raise ValueError(f"matmul: {name} is a scalar: expected an array {shape}")
    if isinstance(weight, QuantizedTensor) and len(weight.shape) > 2:
        raise ValueError(
            f"matmul: the weight has leading axes (shape {weight.shape}): expected a matrix "
            "[K, N]; take jax.vmap or jax.lax.scan over them"
        )
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"matmul: x has {x.shape[-1]} channels in shape {x.shape}, "
            f"but the weight expects {weight.shape[0]} (shape {weight.shape})"
        )
    return x, weight


def _out_dtype(
    x: jax.Array | QuantizedActivations, wanted: jax.typing.DTypeLike | None
) -> jnp.dtype:
    if wanted is not None:
        # The product of integers with a plain weight may be integers.
        kind = jnp.number if jnp.issubdtype(x.dtype, jnp.integer) else jnp.floating
        return as_dtype("matmul: out_dtype", wanted, kind=kind)
    return jnp.dtype(x.dtype)


def _multiply_rows(
    rows: jax.Array | QuantizedActivations,
    weight: QuantizedTensor,
    format: ProductFormat,
    divided: DividedRows | None,
    dtype: jnp.dtype,
    implementation: Implementation | None,
) -> jax.Array:  # [splits, M, N]
    rows, weight = _in_packed_order(rows, weight, format)
    problem = Problem.of(rows.shape[0], weight)
    name = choose(
        "matmul",
        implementation,
        _default(problem, rows, weight),
        get_args(Implementation),
        lambda name: _why_not(name, rows, weight),
    )
    if format.activations.values and not isinstance(rows, QuantizedActivations):
        choice: Literal["reference"] | None = "reference" if name == "reference" else None
        rounding = weight.activations if divided is None else divided
        rows = quantize_rows(rows, rounding, implementation=choice)
    if name == "triton":
        return triton.matmul_terms(rows, weight, plans.triton_config_of(problem), dtype)
    if name == "mosaic":
        from mpjax.kernels.gemm.warpgroups import launch  # here, as importing it takes a while

        return launch.matmul_terms(rows, weight, plans.warpgroup_config_of(problem), dtype)
    if name == "xla":
        assert isinstance(rows, QuantizedActivations)
        return xla.matmul(rows, weight, dtype)[None]
    multiply = dequantize.matmul if name == "dequantize" else reference.matmul
    return multiply(rows, weight, dtype)[None]


def _in_packed_order(
    rows: jax.Array | QuantizedActivations, weight: QuantizedTensor, format: ProductFormat
) -> tuple[jax.Array | QuantizedActivations, QuantizedTensor]:
    """The rows with channels in the order of the words, and the weight without a permutation.

    Rows that are not yet rounded to blocks keep their order, and the weight its permutation.
    """
    if isinstance(rows, QuantizedActivations):
        _check_activations(rows, weight, format)
    elif isinstance(weight.activations, ActivationBlocks):
        return rows, weight  # channels move when rows are rounded to blocks
    if weight.permutation is not None:
        if not isinstance(rows, QuantizedActivations):
            rows = jnp.take(rows, weight.permutation, axis=1)
        weight = dataclasses.replace(weight, permutation=None)
    if weight.format.symmetric and rows.dtype != jnp.bfloat16:
        # Symmetry makes decoding cheaper only for bfloat16. Otherwise the plans that were measured
        # for formats with zero points are better.
        unsymmetric = dataclasses.replace(weight.format, symmetric=False)
        weight = dataclasses.replace(weight, format=unsymmetric)
    return rows, weight


def _default(
    problem: Problem, rows: jax.Array | QuantizedActivations, weight: QuantizedTensor
) -> Implementation:
    """The planned implementation, or the next best if it can't run the call."""
    name: Any = plans.plan_of(problem).implementation
    if name == "mosaic" and _why_not(name, rows, weight) is not None:
        name = plans.plan_by_rule(problem, warpgroups=False).implementation
    if name == "dequantize" and _why_not(name, rows, weight) is not None:
        return "triton"  # a weight that can't be dequantised in memory may still be multiplied
    return name


def _why_not(
    name: str, rows: jax.Array | QuantizedActivations, weight: QuantizedTensor
) -> str | None:
    format = weight.format
    if name == "xla":
        if format.is_flat and format.group_size is None:
            return None
        return f"{format} is not a plain 8-bit matrix with a scale per output channel"
    if format.operand is None and rows.dtype not in (jnp.bfloat16, jnp.float16):
        return f"activations are {rows.dtype}, expected bfloat16 or float16"
    if reason := device.why_triton_cannot_run():
        return reason
    if name == "mosaic":
        return _why_not_mosaic(rows, weight)
    if name == "triton" and format.operand:
        if format.operand == "float8" and (reason := device.why_not_float8()):
            return reason
        return device.why_too_large(max(math.prod(rows.shape), weight.words.size))
    if name == "dequantize" and weight.channel_scales is not None:  # the copy has 8 bits
        largest = max(rows.shape[0], weight.shape[1]) * weight.padded_channels
        return device.why_too_large(largest)
    return None


def _why_not_mosaic(rows: jax.Array | QuantizedActivations, weight: QuantizedTensor) -> str | None:
    if reason := plans.why_not_warpgroups(Problem.of(rows.shape[0], weight)):
        return reason
    in_operand = weight.format.group_size is not None and weight.format.operand is None
    if in_operand and not can_be_operand(weight.scale_dtype, jnp.dtype(rows.dtype)):
        return f"scales are {weight.scale_dtype}, whose range {rows.dtype} does not have"
    return None


def _check_activations(
    x: QuantizedActivations, weight: QuantizedTensor, format: ProductFormat
) -> None:
    wanted = format.activations
    if wanted.values is None:
        raise ValueError(f"matmul: x is quantised, but {format} multiplies 16-bit activations")
    shape = *x.shape[:-1], wanted.groups(x.shape[-1])
    if x.values.dtype != wanted.dtype or x.scales.shape != shape:
        raise ValueError(
            f"matmul: x has {x.values.dtype} values and scales of shape {x.scales.shape}; {format} "
            f"expects {wanted.dtype} and {shape}: use quantize_activations"
        )
    if x.is_permuted and weight.permutation is None:
        raise ValueError(
            "matmul: x is quantised in the order of a permutation, which the weight does not have: "
            "quantise x by the weight's own `activations`"
        )
    if weight.permutation is not None and not x.is_permuted:
        raise ValueError(
            "matmul: x is quantised, but the weight has a permutation of channels: pass x itself, "
            "or quantise it by the weight's own `activations`, if these are blocks"
        )


def _as_rows(x: QuantizedActivations) -> QuantizedActivations:
    return QuantizedActivations(
        x.values.reshape(-1, x.shape[-1]),
        x.scales.reshape(-1, x.scales.shape[-1]),
        x.dtype,
        x.is_permuted,
    )

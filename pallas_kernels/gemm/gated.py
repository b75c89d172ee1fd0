"""The product with a gate and up values, and their activation, in one kernel.

A tile of outputs has as many channels of the gate as of the corresponding up values. The epilogue
joins both, so that a kernel between two products is spared, and the sums are not rounded before.
Only whole sums can pass the gate, so that K is not split.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels.checks import as_array, require_floats
from mpjax.kernels.formats import WeightFormat
from mpjax.kernels.gemm import plans, triton
from mpjax.kernels.gemm.api import in_packed_order, matmul_terms, why_not
from mpjax.kernels.gemm.plans import FEW_ROWS, Problem, TritonConfig
from mpjax.kernels.gemm.plans.configuration import ROW_MULTIPLE
from mpjax.kernels.gemm.triton import Operands, Program
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.launch import Settings, first_program_id, launch, store
from mpjax.kernels.product_format import ProductFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.rowwise.api import gated
from mpjax.kernels.rowwise.triton import activated

LEAST_OUTPUTS = 32  # of a tile: half of them is the fewest for an operand of two warps


def matmul_gated(x: jax.Array, weight: QuantizedTensor, activation: str = "silu") -> jax.Array:
    """activation(gate) · up [..., I] of the product x [..., K] · weight [K, 2 · I].

    It is `gated` of `matmul_terms`, with their arguments, errors and derivatives. Up to 32 rows in
    16 bits, whose product is not split, go through one kernel, which does not round the product.

    activation: as for `gated`.
    """
    x = as_array("matmul_gated: x", x)
    require_floats("matmul_gated", x=x)

    def apart(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
        result = gated(matmul_terms(x, weight), activation, dtype=x.dtype)
        assert isinstance(result, jax.Array)  # nothing was said to be quantised
        return result

    config = config_of(x, weight)
    if config is None:
        return apart(x, weight)

    def fused(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
        rows, ordered = in_packed_order(
            x.reshape(-1, x.shape[-1]), weight, ProductFormat.of(weight.format)
        )
        found = product(rows, ordered, activation, config)
        return found.reshape(*x.shape[:-1], found.shape[-1])

    jax.eval_shape(apart, x, weight)  # which raises the errors of wrong arguments
    result: jax.Array = with_gradients_of(apart, fused, x, weight)
    return result


def config_of(x: jax.Array, weight: QuantizedTensor) -> TritonConfig | None:
    """The configuration of the joint kernel, or None if it doesn't suit the product."""
    is_matrix = isinstance(weight, QuantizedTensor) and len(weight.shape) == 2
    if (
        not is_matrix
        or not x.ndim
        or x.size == 0
        or x.shape[-1] != weight.shape[0]
        or weight.shape[1] % 2
    ):
        return None
    rows = x.size // x.shape[-1]
    if rows > FEW_ROWS or weight.format.operand is not None:
        return None
    problem = Problem.of(rows, weight)
    if plans.plan_of(problem).implementation != "triton":
        return None
    if why_not("triton", x.reshape(rows, -1), weight) is not None:
        return None
    config = plans.triton_config_of(problem)
    if config.splits > 1 and rows < ROW_MULTIPLE:
        # A few percent are worth a kernel less; with more rows they are more than that.
        config = plans.triton_by_rule(problem)
    is_whole = config.splits == 1 and config.unsplit is None
    return config if is_whole and config.tile_n >= LEAST_OUTPUTS else None


# This function has a `jit` of its own, so that calls outside of any `jit` compile once.
@functools.partial(jax.jit, static_argnames=("activation", "config", "interpret"))
def product(
    x: jax.Array,
    weight: QuantizedTensor,
    activation: str,
    config: TritonConfig,
    *,
    interpret: bool = False,
) -> jax.Array:
    """activation(gate) · up [M, I], in the dtype of x [M, K], which is bfloat16 or float16."""
    rows, outputs = x.shape[0], weight.shape[1]
    padding = weight.padded_channels - x.shape[1]
    operands = Operands(
        jnp.pad(x, ((0, 0), (0, padding))) if padding else x,
        None,
        weight.words,
        weight.parameters,
        weight.channel_scales,
        weight.table,
    )
    result: jax.Array = launch(
        functools.partial(
            _kernel,
            format=weight.format,
            scale_dtype=weight.scale_dtype,
            config=config,
            steps=triton.steps_of(weight, config),
            activation=activation,
        ),
        operands,
        out_shape=jax.ShapeDtypeStruct((rows, outputs // 2), x.dtype),
        grid=(pl.cdiv(rows, config.tile_m), pl.cdiv(outputs, config.tile_n), 1),
        settings=Settings(
            f"matmul_gated_{weight.format.codes}", warps=config.warps, stages=config.stages
        ),
        interpret=interpret,
    )
    return result


def _kernel(
    operands: Operands,
    out_ref: Any,  # [M, I]
    *,
    format: WeightFormat,
    scale_dtype: str,
    config: TritonConfig,
    steps: int,
    activation: str,
) -> None:
    row = first_program_id() * config.tile_m + jnp.arange(config.tile_m)
    tile = row, outputs_of_halves(config.tile_n, operands.words.shape[1])
    program = Program(operands, format, scale_dtype, config, 0, tile)
    accumulator = jax.lax.fori_loop(0, steps, program.step, program.zeros)
    gate, up = halves(program.scaled(accumulator))
    result = activated(gate, up, activation)
    channel = pl.program_id(1) * len(result) + jnp.arange(len(result))
    store(
        out_ref.at[row[:, None], channel[None, :]],
        result.T.astype(out_ref.dtype),
        mask=(row < program.rows)[:, None] & (channel < out_ref.shape[1])[None, :],
    )


def outputs_of_halves(tile_n: int, outputs: int) -> jax.Array:
    """The output channels of a program's tile: half of them in each half of all `outputs`."""
    number, half = jnp.arange(tile_n), tile_n // 2
    first = pl.program_id(1) * half
    return first + jnp.where(number >= half, number + (outputs // 2 - half), number)


def halves(product: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second half of a tile's rows.

    They are sums over pairs of rows of which one counts, since Triton can't cut a tile.
    """
    pairs = product.reshape(2, product.shape[0] // 2, product.shape[1])
    which = jax.lax.broadcasted_iota(jnp.int32, pairs.shape, 0)
    first, second = (jnp.where(which == half, pairs, 0.0).sum(0) for half in (0, 1))
    return first, second

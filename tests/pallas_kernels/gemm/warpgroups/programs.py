"""Programs of the warpgroups' kernel, interpreted with one of their parts alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from mpjax.kernels import QuantizedTensor, WeightFormat
from mpjax.kernels.gemm.plans.configuration import WarpgroupConfig
from mpjax.kernels.gemm.plans.shared_memory import stages
from mpjax.kernels.gemm.warpgroups.producer import produce
from mpjax.kernels.gemm.warpgroups.program import Arguments, Call, Program, Shared, shared_memory
from mpjax.kernels.mosaic.launch import Grid, launch

FLOAT = jnp.dtype(jnp.float32)
CODE_UNIT = 64  # of four bits in bfloat16: codes are decoded to so much less than they are

interpreted_here = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="JAX 0.10's interpreter wants every thread to see every phase of a barrier",
)


def call_of(text: str, config: WarpgroupConfig, *, interpret: bool = False) -> Call:
    """A product by warpgroups, of bfloat16 or int8, into float32."""
    format = WeightFormat.parse(text)
    operand = jnp.dtype(format.operand or jnp.bfloat16)
    return Call(
        format=format,
        scale_dtype="float16",
        config=config,
        splits=config.splits,
        stages=stages(format, config, FLOAT),
        operand=jnp.dtype("float8_e4m3fn") if operand.name == "float8" else operand,
        sum_dtype=jnp.dtype(jnp.int32) if operand == jnp.int8 else FLOAT,
        axis="split" if config.is_cluster and not interpret else None,
        band_tiles=None,
        interpret=interpret,
    )


def run_program(
    compute: Callable[[Program, Any, Any], None],
    weight: QuantizedTensor,
    x: jax.Array,
    config: WarpgroupConfig,
    out_shape: tuple[int, ...],
    *,
    copies: bool = True,
) -> jax.Array:
    """The output, float32, that `compute` writes, given a program, a column and a share.

    It runs in each warpgroup but the last, which copies, unless it is told not to.
    """
    call = call_of(str(weight.format), config, interpret=True)

    def kernel(x: Any, words: Any, parameters: Any, out: Any, **shared: Any) -> None:
        arguments = Arguments(x, words, parameters, out=out)
        program = Program.here(call, arguments, Shared(**shared))

        @pl.when(program.warpgroup == config.warpgroups)
        def _copy() -> None:
            if copies:
                produce(program)

        @pl.when(program.warpgroup < config.warpgroups)
        def _compute() -> None:
            column = jax.lax.rem(program.warpgroup, call.columns)
            compute(program, column, program.warpgroup // call.columns)

    return launch(
        kernel,
        x,
        weight.words,
        weight.parameters,
        out_shape=jax.ShapeDtypeStruct(out_shape, FLOAT),
        grid=Grid(
            {"split": 1, "column": -(-weight.shape[1] // config.tile_n), "row": 1},
            config.warpgroups,
        ),
        scratch=shared_memory(call, weight.words.dtype, FLOAT),
        name="program",
        interpret=True,
    )

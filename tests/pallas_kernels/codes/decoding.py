"""A kernel that decodes words and does nothing else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from mpjax.kernels import WeightFormat, codes
from mpjax.kernels.launch import Settings, launch, load, store
from mpjax.kernels.target import PLAIN, Target, tracing_for

TILE = 4096  # words of a column that a program decodes on a GPU


def decode_words(
    words: jax.Array,  # [rows, columns · width]
    parameters: jax.Array,  # uint32 [rows]
    table: jax.Array | None,  # float32 [2**bits]
    *,
    format: WeightFormat,
    operand: str,
    scale_dtype: str,
    interpret: bool,
    scaled: bool = False,
    target: Target = PLAIN,
) -> jax.Array:
    """All planes [planes, rows, width]: in `operand` before scaling, or `scaled` in float32.

    target: what the kernel is traced for if it is interpreted.
    """
    kind, dtype = codes.of(format), jnp.dtype(operand)
    rows, width = words.shape[0], words.shape[1] // format.columns
    tile = rows if interpret else TILE // width
    assert rows % tile == 0

    def kernel(operands: tuple[Any, Any, Any], out_ref: Any) -> None:
        words_ref, parameters_ref, table_ref = operands
        row, lane = pl.program_id(0) * tile + jnp.arange(tile), jnp.arange(width)
        shared = kind.shared(table_ref, dtype, width)
        group = kind.load(load(parameters_ref.at[row]), scale_dtype, dtype, width)
        columns = [
            load(words_ref.at[row[:, None], (column * width + lane)[None, :]])
            for column in range(format.columns)
        ]
        if scaled:
            plane_of = kind.scaled_decoder(columns, group, shared, dtype)
        else:
            plane_of = kind.decoder(columns, group.arguments, shared, dtype)
        for plane in range(format.planes):
            values = plane_of(plane)
            if scaled:
                unit = 2.0 ** kind.scaled_exponent(dtype)
                values = values.astype(jnp.float32) * (1 / unit)
            store(out_ref.at[plane, row[:, None], lane[None, :]], values)

    with tracing_for(target):
        return launch(
            kernel,
            (words, parameters, table),
            out_shape=jax.ShapeDtypeStruct(
                (format.planes, rows, width), jnp.float32 if scaled else dtype
            ),
            grid=(rows // tile,),
            settings=Settings("decode", warps=4),
            interpret=interpret,
        )


decode = jax.jit(
    decode_words,
    static_argnames=("format", "operand", "scale_dtype", "interpret", "scaled", "target"),
)


def bits_of(x: jax.Array | np.ndarray) -> np.ndarray:
    """The bits as unsigned integers, which tell −0 from 0."""
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")

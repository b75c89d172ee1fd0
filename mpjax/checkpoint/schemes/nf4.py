"""Reads 4-bit bitsandbytes checkpoints: NF4 and FP4, with block-wise scales.

With K input and N output channels, a module has `weight` uint8 [N · K / 2, 1], the codes of the
weight [N, K] row by row, with the even one in the high nibble; `weight.absmax`, a scale for each
block of `blocksize` weights; the table `weight.quant_map` float32 [16]; and the quant state, JSON
as bytes, in a tensor whose name ends in `bitsandbytes__nf4` or `bitsandbytes__fp4`. With double
quantisation, scales are uint8 indices of `weight.nested_quant_map`, with a scale
`weight.nested_absmax` for each block of them and an offset. Source: bitsandbytes, functional.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat, files

SOURCE = "quantization_config of a bitsandbytes checkpoint"
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
BLOCK = 64  # weights in a block; the only supported size


@dataclasses.dataclass(frozen=True)
class NF4Reader(Reader):
    """4-bit bitsandbytes. Scales become float16 or bfloat16, rounded if necessary."""

    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight", "weight.absmax", "weight.quant_map"),
        *NESTED,
        *STATES,
    )
    on_host: ClassVar[tuple[str, ...]] = STATES

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has `weight.absmax`."""
        return "weight.absmax" in specs

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        return WeightFormat("table4", BLOCK)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype, and returns (K, N).

        The tensors are flat, so (K, N) is `shape` or, without it, that of the quant state.
        """
        state = next((suffix for suffix in STATES if suffix in specs), None)
        if state is None:
            raise CheckpointError(f"{name} has no tensor {STATES[0]}: expected uint8 [bytes]")
        if shape is None:
            shape = _read_state(name, specs[state])[1]
        channels, outputs = shape
        blocks = channels * outputs // BLOCK
        nested = NESTED[0] in specs
        expected: checks.Expected = {
            "weight": ((channels * outputs // 2, 1), ("uint8",)),
            "weight.absmax": ((blocks,), ("uint8",) if nested else ("float32",)),
            "weight.quant_map": ((16,), ("float32",)),
        }
        if nested:
            groups = specs[NESTED[0]].shape
            expected |= {NESTED[0]: (groups, ("float32",)), NESTED[1]: ((256,), ("float32",))}
        checks.check_tensors(name, specs, expected, "hidden_size and the like")
        if channels % BLOCK:
            raise CheckpointError(
                f"{name} has {channels} input channels: expected a multiple of {BLOCK}, the block "
                "of the checkpoint; load the 16-bit checkpoint"
            )
        return channels, outputs

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Codes with the file's table and a scale for each block of input channels."""
        channels, outputs = self.check(tensors, name, shape)
        state = next(tensors[suffix] for suffix in STATES if suffix in tensors)
        values, found = _read_state(name, state)
        if found != (channels, outputs):
            raise CheckpointError(
                f"{name} has a state for {found[0]} input and {found[1]} output channels: "
                f"the model expects {channels} and {outputs}"
            )
        scales = jnp.asarray(tensors["weight.absmax"])
        if NESTED[0] in tensors:
            nested = (jnp.asarray(tensors[suffix]) for suffix in NESTED)
            scales = _unnest(scales, *nested, **_read_nesting(name, values))
        checks.check_scales(name, scales)
        scales = _narrow(scales.reshape(outputs, -1).T)
        table = jnp.asarray(tensors["weight.quant_map"])
        codes = _codes(jnp.asarray(tensors["weight"])).reshape(outputs, channels)
        return PlainCodes(self.weights, codes.T, scales, table=table)


def read(config: Mapping[str, Any]) -> NF4Reader:
    """Reads a `quantization_config`. Raises CheckpointError for unsupported settings."""
    if checks.parse_switch(config, "load_in_8bit", SOURCE):
        raise CheckpointError(
            f"{SOURCE}: load_in_8bit is true, which is not read: load the 16-bit checkpoint "
            "with precision='W8A8KV8'"
        )
    checks.require_choice(config, "bnb_4bit_quant_type", ("nf4", "fp4"), SOURCE, "fp4")
    checks.require_choice(config, "bnb_4bit_quant_storage", ("uint8",), SOURCE, "uint8")
    return NF4Reader()


SCHEME = Scheme(title="bitsandbytes", methods=("bitsandbytes",), reader=NF4Reader, read=read)


def _read_state(name: str, state: Any) -> tuple[dict[str, Any], tuple[int, int]]:
    """The quant state of a module, parsed, and its (K, N)."""
    where = f"the quant_state of {name}"
    text = files.decode(np.asarray(state).tobytes(), where, CheckpointError)
    values = files.parse_object(text, where, CheckpointError)
    checks.require_choice(values, "blocksize", (BLOCK,), where)
    shape = values.get("shape")
    if not isinstance(shape, list) or [type(size) for size in shape] != [int, int]:
        raise CheckpointError(f"{where}: shape is {json.dumps(shape)[:80]}: expected two numbers")
    return values, (shape[1], shape[0])


def _read_nesting(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `_unnest` in a quant state."""
    where = f"the quant_state of {name}"
    size = checks.parse_integer(values, ("nested_blocksize",), where)
    offset = values.get("nested_offset", 0.0)
    if size < 1 or type(offset) not in (int, float) or not np.isfinite(offset):
        raise CheckpointError(
            f"{where}: nested_blocksize is {size} and nested_offset {offset!r:.80}: expected a "
            "positive integer and a number"
        )
    return {"size": size, "offset": float(offset)}


def _unnest(
    codes: jax.Array, nested: jax.Array, table: jax.Array, *, size: int, offset: float
) -> jax.Array:
    """Dequantises double-quantised scales: float32 table[code] · block scale + offset."""
    blocks = jnp.arange(len(codes)) // size
    return table[codes] * nested[jnp.minimum(blocks, len(nested) - 1)] + jnp.float32(offset)


def _narrow(scales: jax.Array) -> jax.Array:
    """Scales in a 16-bit dtype that holds them exactly, or else rounded, to float16 if in range."""
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = scales.astype(dtype)
        if bool(jnp.all(narrow.astype(jnp.float32) == scales)):
            return narrow
    largest, least = float(jnp.abs(scales).max()), float(jnp.abs(scales).min())
    fits = largest < 65504 and least > 2.0**-14
    return scales.astype(jnp.float16 if fits else jnp.bfloat16)


@jax.jit
def _codes(packed: jax.Array) -> jax.Array:
    flat = packed.reshape(-1)
    return jnp.stack([flat >> jnp.uint8(4), flat & jnp.uint8(15)], axis=-1).reshape(-1)

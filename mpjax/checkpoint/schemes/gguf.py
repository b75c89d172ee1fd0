"""The scheme of GGUF files: blocks of codes, with one type for each linear map.

A module has one tensor, whose suffix is the type: `q8_0`, uint8 [N, blocks, bytes of a block].
Types with a scale for every 32 weights or more keep their codes, of which those of IQ types index a
table; the scales and minima of K and IQ types, products of two numbers, are rounded to float16.
Q2_K, Q3_K, Q6_K, IQ1_M, IQ2_XS and IQ2_S have a scale for every 16 weights, which no format here
has: their weights are dequantised and rounded to 8 bits. A precision may ask for another format for
all.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp

from mpjax.checkpoint.gguf.blocks import BLOCK_TYPES, E2M1, GROUP, TensorType
from mpjax.checkpoint.gguf.delta import Heads
from mpjax.checkpoint.schemes import checks
from mpjax.checkpoint.schemes.rounded import ROUNDED, RoundedReader, describe_rounding, round_to
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.precision import describe_weights

TABLE_NAMES = ("model.embed_tokens", "lm_head")  # tables, which are dequantised
TYPES = {kind.name.lower(): kind for kind in BLOCK_TYPES.values()}


@dataclasses.dataclass(frozen=True)
class GGUFReader(RoundedReader):
    """Reads GGUF modules. Without a target, codes are kept if a weight format has them.

    types: the block type, such as `Q8_0`, by Hugging Face's module name.
    heads: by name, the Heads of modules whose input channels are value heads in the order of
        Qwen3.5's GGUF files.
    """

    suffixes: ClassVar[tuple[str, ...]] = tuple(TYPES)

    types: Mapping[str, str]
    heads: Mapping[str, Heads] = dataclasses.field(default_factory=dict)

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has a tensor of GGUF blocks."""
        return any(suffix in TYPES for suffix in specs)

    @property
    def weights(self) -> WeightFormat:
        """The most common weight format of the modules."""
        counts = collections.Counter(self._format(kind) for kind in self.types.values())
        [(format, _)] = counts.most_common(1)
        return format

    @property
    def loss(self) -> str | None:
        """A description of the types whose codes or scales are rounded; None if none are."""
        maps = [name for name in self.types if name not in TABLE_NAMES]
        rounded = {self.types[name] for name in maps if not self.keeps_codes(name)}
        kept = {self.types[name] for name in maps} - rounded
        narrowed = {type for type in kept if BLOCK_TYPES[type].size > BLOCK_TYPES[type].group}
        parts = []
        if rounded:
            parts.append(f"{', '.join(sorted(rounded))} to {describe_rounding(self.target)}")
        if narrowed:
            with_minima = any(BLOCK_TYPES[type].has_minima for type in narrowed)
            what = "scales and minima" if with_minima else "scales"
            parts.append(f"{what} of {', '.join(sorted(narrowed))} to float16")
        return "; ".join(parts) or None

    @property
    def contents(self) -> str:
        """A description of the maps' and tables' types, their counts, and how they are loaded."""
        maps = collections.Counter(t for name, t in self.types.items() if name not in TABLE_NAMES)
        tables = sorted({t for name, t in self.types.items() if name in TABLE_NAMES})
        parts = []
        for type, count in maps.most_common():
            format, own = self._format(type), own_format(BLOCK_TYPES[type])
            said = "codes kept as" if format == own else "rounded to"
            parts.append(f"{count} maps in {type}, {said} {describe_weights(format)}")
        parts += [f"tables in {type}, dequantised" for type in tables]
        return "; ".join(parts)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        format = self._format(self.types[name])
        checks.require_groups(name, channels, format)
        return format

    def _format(self, type: str) -> WeightFormat:
        own = own_format(BLOCK_TYPES[type])
        if self.target is None:
            return own or ROUNDED
        return own if own is not None and _agree(own, self.target) else self.target

    def keeps_codes(self, name: str) -> bool:
        """Whether a module's codes are kept."""
        kind = BLOCK_TYPES[self.types[name]]
        return self._format(kind.name) == own_format(kind)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensor by shape and dtype and returns its (K, N)."""
        kind, spec = _only(specs, name)
        if len(spec.shape) != 3:
            raise CheckpointError(
                f"{name} is {checks.describe(spec)}: expected the blocks of a matrix"
            )
        outputs, blocks, _ = spec.shape
        checks.check_weight_shape(name, (blocks * kind.size, outputs), shape, None)
        return blocks * kind.size, outputs

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """The module's own codes if a format has them, or the codes nearest to its weights."""
        channels, _ = self.check(tensors, name, shape)
        kind, blocks = _only(tensors, name)
        format = self.format(name, channels)
        keeps, heads = self.keeps_codes(name), self.heads.get(name)
        if heads is None:
            convert = _own_codes if keeps else _round
            return convert(jnp.asarray(blocks), kind, format)
        if not keeps:
            return round_to(self.dequantize(tensors, name, shape), format)
        if heads.value_dim % GROUP:
            raise CheckpointError(
                f"{name} is in {kind.name}, with value heads of {heads.value_dim} channels: "
                f"expected a multiple of {GROUP}, a group of which has one scale"
            )
        plain = _own_codes(jnp.asarray(blocks), kind, format)
        scales, zeros = (
            None if array is None else heads.grouped(array, heads.value_dim // GROUP)
            for array in (plain.scales, plain.zeros)
        )
        codes = heads.grouped(plain.codes, heads.value_dim)
        return dataclasses.replace(plain, codes=codes, scales=scales, zeros=zeros)

    def dequantize(self, tensors: Tensors, name: str, shape: Shape | None = None) -> jax.Array:
        """The weight float32 [K, N], bit for bit as ggml computes it."""
        self.check(tensors, name, shape)
        kind, blocks = _only(tensors, name)
        values = _values(jnp.asarray(blocks), kind)
        heads = self.heads.get(name)
        return values if heads is None else heads.grouped(values, heads.value_dim)


def read(config: Mapping[str, Any]) -> NoReturn:
    """Raises CheckpointError: a GGUF file has no config.json."""
    raise CheckpointError(
        "quant_method 'gguf' is that of a single file: load the .gguf file itself"
    )


SCHEME = Scheme(
    title="GGUF", methods=("gguf",), reader=GGUFReader, read=read, dequantizes_tables=True
)


def own_format(kind: TensorType) -> WeightFormat | None:
    """The weight format that can hold the codes of a type; None if there is none."""
    if kind.codes is None:
        return None
    if kind.table is not None:
        is_float = kind.table == E2M1
        return WeightFormat("float4" if is_float else f"table{kind.code_bits}", kind.group)
    bits = 4 if kind.code_bits <= 4 else 8
    if kind.has_minima:
        return WeightFormat(f"affine{bits}", GROUP)
    return WeightFormat(f"uint{bits}", GROUP, symmetric=True)


def _agree(own: WeightFormat, target: WeightFormat) -> bool:
    """Whether the formats are equal except for symmetry.

    Symmetric codes can be stored in the asymmetric format, with a constant zero point.
    """
    return dataclasses.replace(own, symmetric=False) == dataclasses.replace(target, symmetric=False)


@functools.partial(jax.jit, static_argnames="kind")
def _values(blocks: jax.Array, kind: TensorType) -> jax.Array:
    return kind.dequantize(blocks).T


@functools.partial(jax.jit, static_argnames=("kind", "format"))
def _round(blocks: jax.Array, kind: TensorType, format: WeightFormat) -> PlainCodes:
    return round_to(kind.dequantize(blocks).T, format)


@functools.partial(jax.jit, static_argnames=("kind", "format"))
def _own_codes(blocks: jax.Array, kind: TensorType, format: WeightFormat) -> PlainCodes:
    assert kind.codes is not None
    found, rows = kind.codes(blocks), blocks.shape[0]
    is_signed = kind.table is None and not kind.has_minima
    middle = 2 ** (format.bits - 1) if is_signed else 0
    codes = (found.codes + middle).astype(jnp.uint8).reshape(rows, -1)
    dtype = jnp.bfloat16 if format.codes == "float4" else jnp.float16
    scales, minima = (
        None if array is None else array.astype(dtype).reshape(rows, -1).T
        for array in (found.scales, found.minima)
    )
    assert scales is not None
    table = jnp.asarray(kind.table, jnp.float32) if format.codes.startswith("table") else None
    return PlainCodes(format, codes.T, scales, minima, table=table)


def _only(tensors: Mapping[str, Any], name: str) -> tuple[TensorType, Any]:
    """The type and the tensor of a module. Raises CheckpointError unless it has exactly one."""
    found = [(TYPES[suffix], tensor) for suffix, tensor in tensors.items() if suffix in TYPES]
    if len(found) != 1:
        raise CheckpointError(f"{name} has the tensors {', '.join(tensors)}: expected one")
    return found[0]

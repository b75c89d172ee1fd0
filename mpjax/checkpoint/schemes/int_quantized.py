"""compressed-tensors' `int-quantized`: 8-bit integers, and activations rounded to 8 bits.

With K input and N output channels, a module has `weight` int8 [N, K] and `weight_scale`, [N, 1] for
each output channel or [1] for all; the weight is code · scale. It may have `input_scale`, see
`static_activations`. Source: compressed-tensors, compressors/naive_quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import checks, compressed_tensors, static_activations, writing
from mpjax.checkpoint.schemes.compressed_tensors import INTEGERS, METHOD, NAIVE, SOURCE
from mpjax.checkpoint.schemes.reader import Activations, Reader
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Axes, Axis, Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat

DYNAMIC = "8-bit int with dynamic scales (strategy 'token')"
STATIC = "8-bit int with static scales (strategy 'tensor')"
ROUNDED = Activations("int8", operands=(None, "int8"))


@dataclasses.dataclass(frozen=True)
class IntQuantizedReader(Reader):
    """8-bit integers with a scale for each output channel, or a single scale.

    by_channel: whether there is a scale for each output channel.
    activations: `int8` with a scale for each token or with the file's scale; or 16 bits, for which
        weights become unsigned codes.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", static_activations.SUFFIX)

    by_channel: bool = True
    activations: Activations = ROUNDED

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module's weight is int8 with a scale."""
        return {"weight", "weight_scale"} <= specs.keys() and str(specs["weight"].dtype) == "int8"

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        return WeightFormat("uint8") if self.activations.operand is None else WeightFormat("int8")

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        if "weight" not in specs or len(specs["weight"].shape) != 2:
            raise CheckpointError(
                f"{name} has no tensor weight that is a matrix: expected int8 [N, K]"
            )
        outputs, channels = specs["weight"].shape
        checks.check_weight_shape(name, (channels, outputs), shape, None)
        scales = (outputs, 1) if self.by_channel else (1,)
        expected = {
            "weight": ((outputs, channels), ("int8",)),
            "weight_scale": (scales, checks.SCALE_DTYPES),
        }
        checks.check_tensors(name, specs, expected, "quantization_config")
        if self.activations.are_static:
            static_activations.check(specs, name)
        return channels, outputs

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes: weights are [output, input channels], scales [output channels, 1] or [1]."""
        scales = Axes(None, Axis(0) if self.by_channel else None)
        return {"weight": Axes(Axis(1), Axis(0)), "weight_scale": scales}

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Codes int8 [K, N], or uint8 for 16-bit activations, with scales [1, N]."""
        _, outputs = self.check(tensors, name, shape)
        codes = jnp.asarray(tensors["weight"]).T
        scales = jnp.asarray(tensors["weight_scale"]).reshape(1, -1)
        scales = jnp.broadcast_to(scales, (1, outputs))
        if self.activations.operand is not None:
            are_static = self.activations.are_static
            scale = static_activations.read(tensors, name) if are_static else None
            scales = scales.astype(jnp.float32)
            return PlainCodes(self.weights, codes, scales, activation_scale=scale)
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ jnp.uint8(128)
        return PlainCodes(self.weights, codes, scales, jnp.full(scales.shape, 128, jnp.uint16))


def read(config: Mapping[str, Any]) -> IntQuantizedReader:
    """Reads a `quantization_config`. Raises CheckpointError for unsupported settings."""
    group, source = compressed_tensors.read_only_group(config, (INTEGERS, NAIVE), SOURCE)
    weights = compressed_tensors.read_integers(group, source)
    checks.require_choice(weights, "num_bits", (8,), f"{source}, weights")
    checks.require_choice(weights, "symmetric", (True,), f"{source}, weights", True)
    checks.require_choice(weights, "strategy", ("channel", "tensor"), f"{source}, weights")
    activations = compressed_tensors.read_activations(
        group, source, ROUNDED, dynamic=DYNAMIC, static=STATIC
    )
    return IntQuantizedReader(weights["strategy"] == "channel", activations)


def write(layout: str, modules: writing.Modules) -> writing.Writer:
    """The writer of int8 with scales per output channel, and static activation scales."""
    writing.require_codes(layout, modules, ("int8",))
    activations = ROUNDED._replace(is_static=writing.are_static(layout, modules))

    def config(plain: Sequence[str], cache: str | None) -> dict[str, Any]:
        group = compressed_tensors.write_group(
            compressed_tensors.write_weights(8, "int", "channel"),
            compressed_tensors.write_activations("int", activations),
        )
        return compressed_tensors.write(INTEGERS, [group], plain, cache)

    def encode(plain: PlainCodes, name: str) -> dict[str, Any]:
        scale = static_activations.written(plain)
        return {"weight": plain.codes.T, "weight_scale": plain.scales.T, **scale}

    return writing.Writer(config, encode)


SCHEME = Scheme(
    title="int-quantized",
    article="an",
    methods=(METHOD,),
    reader=IntQuantizedReader,
    read=read,
    matches=lambda config: compressed_tensors.is_layout(config, INTEGERS),
    # Not read: only symmetric activations are supported, whose zero points are 0.
    ignored=("input_zero_point",),
    writing=writing.Writing((INTEGERS,), write, default_for=("int8",), packs_heads=True),
)

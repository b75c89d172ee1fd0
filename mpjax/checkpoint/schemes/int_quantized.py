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
from mpjax.checkpoint.schemes.base import Axes, Axis, Scheme, Specs
from mpjax.checkpoint.schemes.compressed_tensors import INTEGERS, METHOD, NAIVE, SOURCE
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat

DYNAMIC = "8-bit int with dynamic scales (strategy 'token')"
STATIC = "8-bit int with static scales (strategy 'tensor')"


@dataclasses.dataclass(frozen=True)
class IntQuantizedScheme(Scheme):
    """8-bit integers with a scale for each output channel, or one for all.

    by_channel: whether there is one for each.
    activations: what products round activations to, on the fly: `int8`, or None for 16-bit
        activations.
    is_static: whether the scale of these is the file's, and not one for each token.
    unsupported_activations, has_cache_scales: see Scheme.
    """

    title: ClassVar[str] = "int-quantized"
    article: ClassVar[str] = "an"
    methods: ClassVar[tuple[str, ...]] = (METHOD,)
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", static_activations.SUFFIX)
    # The zero points of static activations, all 0 where the scales are used.
    ignored: ClassVar[tuple[str, ...]] = ("input_zero_point",)
    layouts: ClassVar[tuple[str, ...]] = (INTEGERS,)
    default_for: ClassVar[tuple[str, ...]] = ("int8",)

    by_channel: bool = True
    activations: str | None = "int8"
    unsupported_activations: str | None = None
    has_cache_scales: bool = False
    is_static: bool = False

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this format."""
        return compressed_tensors.is_layout(config, INTEGERS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> IntQuantizedScheme:
        """Reads config.json's `quantization_config`. Raises CheckpointError."""
        groups = compressed_tensors.read_groups(config, (INTEGERS, NAIVE), SOURCE)
        parsed = {_read_group(group, f"{SOURCE}, group {name!r}") for name, group in groups.items()}
        if len(parsed) > 1:
            raise CheckpointError(
                f"{SOURCE}: config_groups {', '.join(groups)} differ: expected one scheme for all"
            )
        has_cache_scales = compressed_tensors.has_cache_scales(config, SOURCE)
        return dataclasses.replace(parsed.pop(), has_cache_scales=has_cache_scales)

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module's weight is 8-bit integers with a scale."""
        return {"weight", "weight_scale"} <= specs.keys() and str(specs["weight"].dtype) == "int8"

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        return WeightFormat("uint8") if self.activations is None else WeightFormat("int8")

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        return self.weights

    @property
    def choices(self) -> tuple[IntQuantizedScheme, ...]:
        """The same weights with activations of 16 bits, and rounded to 8 bits."""
        return tuple(
            dataclasses.replace(self, activations=activations, unsupported_activations=None)
            for activations in (None, "int8")
        )

    def for_experts(self) -> IntQuantizedScheme:
        """The same weights with activations that have a scale for each token."""
        return dataclasses.replace(self, is_static=False)

    @property
    def rounds_statically(self) -> bool:
        """Whether activations are rounded, and with a scale of the files."""
        return self.is_static and self.activations is not None

    def check(
        self, specs: Specs, name: str, shape: tuple[int, int] | None = None
    ) -> tuple[int, int]:
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
        if self.rounds_statically:
            static_activations.check(specs, name)
        return channels, outputs

    def axes(self, name: str) -> dict[str, Axes]:
        """Weights are [output, input channels], with scales [output channels, 1] or one."""
        scales = Axes(None, Axis(0) if self.by_channel else None)
        return {"weight": Axes(Axis(1), Axis(0)), "weight_scale": scales}

    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """Codes int8 [K, N], or beside 16-bit activations uint8 ones, with scales [1, N]."""
        _, outputs = self.check(tensors, name, shape)
        codes = jnp.asarray(tensors["weight"]).T
        scales = jnp.asarray(tensors["weight_scale"]).reshape(1, -1)
        scales = jnp.broadcast_to(scales, (1, outputs))
        if self.activations is not None:
            scale = static_activations.read(tensors, name) if self.is_static else None
            scales = scales.astype(jnp.float32)
            return PlainCodes(self.weights, codes, scales, activation_scale=scale)
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ jnp.uint8(128)
        return PlainCodes(self.weights, codes, scales, jnp.full(scales.shape, 128, jnp.uint16))

    @classmethod
    def of_layout(cls, layout: str, modules: writing.Modules) -> IntQuantizedScheme:
        """A scale for each output channel, and activations that are rounded as the modules say."""
        writing.require_codes(layout, modules, cls.default_for)
        return cls(is_static=writing.are_static(layout, modules))

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """The `quantization_config` of an exported checkpoint; see Scheme."""
        group = compressed_tensors.write_group(
            compressed_tensors.write_weights(8, "int", "channel" if self.by_channel else "tensor"),
            None
            if self.activations is None
            else compressed_tensors.write_activations("int", static=self.is_static),
        )
        return compressed_tensors.write(INTEGERS, [group], plain, cache)

    def encode(self, plain: PlainCodes, name: str) -> dict[str, Any]:
        """The tensors of one module."""
        codes = plain.codes
        if self.activations is None:
            codes = jax.lax.bitcast_convert_type(codes ^ jnp.uint8(128), jnp.int8)
        scales = plain.scales.T
        found: dict[str, Any] = {"weight": codes.T}
        found["weight_scale"] = scales if self.by_channel else scales[0]
        if self.rounds_statically:
            found[static_activations.SUFFIX] = plain.activation_scale
        return found

    @property
    def layout_of_heads(self) -> str | None:
        """The layout, in which a quantised head is a module like others."""
        return INTEGERS

    @property
    def can_hold_cache_scales(self) -> bool:
        """Whether scales of an FP8 cache may lie beside the weights."""
        return True


def _read_group(group: Mapping[str, Any], source: str) -> IntQuantizedScheme:
    weights = compressed_tensors.read_integers(group, source)
    checks.require_choice(weights, "num_bits", (8,), f"{source}, weights")
    checks.require_choice(weights, "symmetric", (True,), f"{source}, weights", True)
    checks.require_choice(weights, "strategy", ("channel", "tensor"), f"{source}, weights")
    by_channel = weights["strategy"] == "channel"
    activations = compressed_tensors.describe_activations(group, source)
    if activations in (None, DYNAMIC, STATIC):
        rounded = None if activations is None else "int8"
        return IntQuantizedScheme(by_channel, rounded, is_static=activations == STATIC)
    return IntQuantizedScheme(by_channel, None, activations)

"""Reads and writes FP8 (e4m3) checkpoints: fine-grained, compressed-tensors', and ModelOpt's.

With K input and N output channels, a module has `weight` float8_e4m3fn [N, K] and scales: one for
each block of output and input channels, `weight_scale_inv` or `weight_scale`
[⌈N / block⌉, ⌈K / block⌉]; one for each output channel, `weight_scale` [N, 1]; or one scale, [1].
The weight is code · scale under both names ("inv" is the inverse of the quantiser's factor). It may
have `input_scale`, see `static_activations`.
Source: DeepSeek-V3 §3.3.2 and its README_WEIGHTS.md; compressed-tensors,
compressors/quantized_compressors.

In config.json, the `quant_method` `fp8` is the fine-grained format of DeepSeek-V3 and of Qwen's FP8
models; source: transformers, utils/quantization_config.py (FineGrainedFP8Config).
`compressed-tensors` is llm-compressor's; source: compressed-tensors, quantization/quant_args.py and
quantization/quant_scheme.py. `modelopt` is NVIDIA's, whose scales are a single one [], one for each
output channel [N], or one for each block, [⌈N / block⌉, 1, ⌈K / block⌉, 1].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mpjax.checkpoint.schemes import (
    checks,
    compressed_tensors,
    modelopt,
    static_activations,
    writing,
)
from mpjax.checkpoint.schemes.base import Axes, Axis, Scheme, Specs
from mpjax.checkpoint.schemes.compressed_tensors import (
    FLOATS,
    GLOBAL_SCALES,
    METHOD,
    NAIVE,
    PACKED_TENSORS,
)
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import is_known
from mpjax.precision import describe_weights

SOURCE = "quantization_config of an FP8 checkpoint"
FINE_GRAINED = "fp8"
SCALE_NAMES = {
    FINE_GRAINED: "weight_scale_inv",
    METHOD: "weight_scale",
    modelopt.METHOD: "weight_scale",
}
STATIC = "8-bit float with static scales (strategy 'tensor')"
GROUP_SIZE = 128  # input channels per block: the only size for which there are kernels


@dataclasses.dataclass(frozen=True)
class FP8Scheme(Scheme):
    """FP8 weights (e4m3) with a scale for each block, each output channel, or each matrix.

    method: `fp8` or `compressed-tensors`, which name their tensors differently.
    block: output and input channels that share a scale; None means all of them.
    activations: the format to which products round activations: `float8`, with a scale computed
        for each token (and each group of a block's input channels), or None for 16 bits.
    is_static: whether the scale of these is the file's, one for all tokens.
    unsupported_activations: see Scheme; None where `activations` is the checkpoint's own format.
    has_cache_scales: whether the checkpoint also has scales for an FP8 cache.
    """

    title: ClassVar[str] = "FP8"
    article: ClassVar[str] = "an"
    methods: ClassVar[tuple[str, ...]] = tuple(SCALE_NAMES)
    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight", *dict.fromkeys(SCALE_NAMES.values())),
        static_activations.SUFFIX,
    )
    ignored: ClassVar[tuple[str, ...]] = (
        "activation_scale",  # static, of activations beside blocks of weights
        *("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt's, where the cache is not FP8
    )

    layouts: ClassVar[tuple[str, ...]] = (FLOATS, FINE_GRAINED)
    default_for: ClassVar[tuple[str, ...]] = ("float8",)

    method: str
    block: tuple[int | None, int | None]
    activations: str | None
    unsupported_activations: str | None = None
    has_cache_scales: bool = False
    is_static: bool = False

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` is of this format."""
        method = checks.method_of(config)
        if method == modelopt.METHOD:
            return modelopt.algorithm(config) in modelopt.FP8_ALGORITHMS
        return method == FINE_GRAINED or compressed_tensors.is_layout(config, FLOATS)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FP8Scheme:
        """Reads config.json's `quantization_config`.

        Raises CheckpointError for another method, and for an FP8 layout that can't be read.
        """
        method = checks.method_of(config)
        if method == FINE_GRAINED:
            return _fine_grained(config)
        if method == METHOD:
            return _compressed_tensors(config)
        if method == modelopt.METHOD:
            return _modelopt(config)
        raise CheckpointError(
            f"{SOURCE}: quant_method is {method!r}: expected {' or '.join(map(repr, SCALE_NAMES))}"
        )

    @property
    def scale_name(self) -> str:
        """The suffix of the scales beside a module's `weight`."""
        return SCALE_NAMES[self.method]

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has an FP8 weight, or a tensor with the name of its scales."""
        dtype = str(specs["weight"].dtype) if "weight" in specs else ""
        if dtype.startswith("float8") or SCALE_NAMES[FINE_GRAINED] in specs:
            return True
        has_integers = dtype == "int8" or any(suffix in specs for suffix in PACKED_TENSORS)
        has_others = has_integers or any(suffix in specs for suffix in GLOBAL_SCALES)
        return SCALE_NAMES[METHOD] in specs and not has_others

    @property
    def quant_method(self) -> str:
        """The `quant_method` of config.json."""
        return self.method

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        return WeightFormat("float8", self.block[1], operand=self.activations)

    def format(self, name: str, channels: int) -> WeightFormat:
        """The format of one module on the device."""
        return self.weights

    @property
    def choices(self) -> tuple[FP8Scheme, ...]:
        """Two schemes of the same weights: with 16-bit activations, and with FP8 activations."""
        return tuple(
            dataclasses.replace(self, activations=activations, unsupported_activations=None)
            for activations in (None, "float8")
        )

    def for_experts(self) -> FP8Scheme:
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
                f"{name} has no tensor weight that is a matrix: expected FP8 [N, K]"
            )
        outputs, channels = specs["weight"].shape
        checks.check_weight_shape(name, (channels, outputs), shape, None)
        size = self.block[0]
        groups = self.weights.groups(channels)  # as of the outputs, the last may be cut
        # A single scale is stored as a vector of one number, not as a matrix.
        grid: tuple[int, ...] = (1,) if size is None else (-(-outputs // size), groups)
        grid = self._grid_of_modelopt(grid, specs) if self.method == modelopt.METHOD else grid
        checks.check_tensors(
            name,
            specs,
            {
                "weight": ((outputs, channels), ("float8_e4m3fn",)),
                self.scale_name: (grid, checks.SCALE_DTYPES),
            },
            "quantization_config",
        )
        if self.rounds_statically:
            static_activations.check(specs, name)
        return channels, outputs

    def _grid_of_modelopt(self, grid: tuple[int, ...], specs: Specs) -> tuple[int, ...]:
        """The shape of ModelOpt's scales, which has no axes of one, or one after each of two."""
        if self.block[1] is None:
            return grid[:-1]
        found = specs[self.scale_name].shape if self.scale_name in specs else ()
        return grid if len(found) == 2 else (grid[0], 1, grid[1], 1)

    @property
    def may_lack_cache_scales(self) -> bool:
        """ModelOpt leaves out scales of 1."""
        return self.method == modelopt.METHOD

    def axes(self, name: str) -> dict[str, Axes]:
        """Weights are [output, input channels], and scales those of blocks."""
        rows, columns = self.block
        scales = Axes(
            None if columns is None else Axis(1, columns), None if rows is None else Axis(0, rows)
        )
        return {"weight": Axes(Axis(1), Axis(0)), self.scale_name: scales}

    def decode(
        self, tensors: Mapping[str, Any], name: str, shape: tuple[int, int] | None = None
    ) -> PlainCodes:
        """Decodes one module: codes float8_e4m3fn [K, N] with scales float32 [groups, N].

        Raises CheckpointError as `check` does, and for a NaN, which kernels decode to a number.
        """
        channels, outputs = self.check(tensors, name, shape)
        weight = jnp.asarray(tensors["weight"])
        if is_known(weight) and bool(_any_nan(weight)):
            raise CheckpointError(
                f"{name}.weight has weights that are NaN: the checkpoint is damaged"
            )
        scales = jnp.asarray(tensors[self.scale_name])
        checks.check_scales(name, scales)  # before the repetition, so that it counts each once
        scales = scales.reshape(-1, self.weights.groups(channels))
        size = min(self.block[0] or outputs, outputs)
        scales = _scales_of_channels(scales, size=size, outputs=outputs)
        scale = static_activations.read(tensors, name) if self.rounds_statically else None
        return PlainCodes(self.weights, weight.T, scales, activation_scale=scale)

    @classmethod
    def of_layout(cls, layout: str, modules: writing.Modules) -> FP8Scheme:
        """A scale for each output channel, or for each block of 128 × 128 channels."""
        writing.require_codes(layout, modules, cls.default_for)
        format = writing.only_format(layout, modules)
        if layout == FLOATS:
            block = (1, None) if format.group_size is None else (GROUP_SIZE, GROUP_SIZE)
            is_static = writing.are_static(layout, modules)
            return cls(METHOD, block, format.operand, is_static=is_static)
        if format.group_size is None or format.operand is None:
            raise ValueError(
                f"format {layout!r} holds blocks of {GROUP_SIZE} input channels that meet FP8 "
                f"activations, WFP8g128AFP8, and the weights are {describe_weights(format)}: "
                f"export as {FLOATS!r}"
            )
        return cls(FINE_GRAINED, (GROUP_SIZE, GROUP_SIZE), format.operand)

    def quantization_config(self, plain: Sequence[str], cache: str | None = None) -> dict[str, Any]:
        """The `quantization_config` of an exported checkpoint; see Scheme."""
        if self.method == FINE_GRAINED:
            return {
                "quant_method": FINE_GRAINED,
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": list(plain),
            }
        rows, columns = self.block
        strategy = "tensor" if rows is None else "channel" if columns is None else "block"
        group = compressed_tensors.write_group(
            compressed_tensors.write_weights(
                *(8, "float", strategy),
                block_structure=list(self.block) if strategy == "block" else None,
            ),
            None
            if self.activations is None
            else compressed_tensors.write_activations("float", columns, static=self.is_static),
        )
        return compressed_tensors.write(FLOATS, [group], plain, cache)

    def encode(self, plain: PlainCodes, name: str) -> dict[str, Any]:
        """The tensors of one module.

        Raises ValueError where scales differ within a block.
        """
        rows, outputs = self.block[0], plain.shape[1]
        size = min(rows or outputs, outputs)
        scales = plain.scales.T[::size]
        again = _scales_of_channels(scales, size=size, outputs=outputs)
        if is_known(again) and not bool(jnp.all(again == plain.scales)):
            raise ValueError(
                f"{name} has scales that differ within a block of {size} output channels, which no "
                "format that others read can hold: quantise to WFP8gKA16, with a scale for each "
                f"output channel, or {writing.REMEDY}"
            )
        found: dict[str, Any] = {
            "weight": plain.codes.T,
            self.scale_name: scales.reshape(-1) if rows is None else scales,
        }
        if self.rounds_statically:
            found[static_activations.SUFFIX] = plain.activation_scale
        return found

    @property
    def can_hold_cache_scales(self) -> bool:
        """Whether scales of an FP8 cache may lie beside the weights."""
        return self.method == METHOD


def _fine_grained(config: Mapping[str, Any]) -> FP8Scheme:
    checks.require_choice(config, "fmt", ("e4m3",), SOURCE, "e4m3")
    checks.require_choice(config, "scale_fmt", ("float",), SOURCE, "float")
    checks.require_choice(config, "activation_scheme", ("dynamic", "static"), SOURCE, "dynamic")
    block = _parse_block(config, "weight_block_size", SOURCE)
    if config.get("activation_scheme") == "static":
        return FP8Scheme(FINE_GRAINED, block, None, "FP8 with static scales")
    return FP8Scheme(FINE_GRAINED, block, "float8")


def _modelopt(config: Mapping[str, Any]) -> FP8Scheme:
    scheme = {
        modelopt.FP8: FP8Scheme(modelopt.METHOD, (None, None), "float8", is_static=True),
        modelopt.FP8_CHANNELS: FP8Scheme(modelopt.METHOD, (1, None), "float8"),
        modelopt.FP8_BLOCKS: FP8Scheme(modelopt.METHOD, (GROUP_SIZE, GROUP_SIZE), None),
    }[modelopt.algorithm(config)]
    return dataclasses.replace(scheme, has_cache_scales=modelopt.has_cache_scales(config))


def _compressed_tensors(config: Mapping[str, Any]) -> FP8Scheme:
    parsed = {}
    for name, group in compressed_tensors.read_groups(config, (FLOATS, NAIVE), SOURCE).items():
        source = f"{SOURCE}, group {name!r}"
        block = _parse_weights(group.get("weights"), f"{source}, weights")
        parsed[name] = _with_activations(FP8Scheme(METHOD, block, None), group, source)
    if len(set(parsed.values())) > 1:
        raise CheckpointError(
            f"{SOURCE}: config_groups {', '.join(parsed)} differ: expected one scheme for all"
        )
    has_cache_scales = compressed_tensors.has_cache_scales(config, SOURCE)
    return dataclasses.replace(next(iter(parsed.values())), has_cache_scales=has_cache_scales)


def _parse_weights(weights: Any, source: str) -> tuple[int | None, int | None]:
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{source} is {weights!r}: expected an object")
    checks.require_choice(weights, "type", ("float",), source)
    checks.require_choice(weights, "num_bits", (8,), source)
    checks.require_choice(weights, "symmetric", (True,), source, True)
    checks.require_choice(weights, "dynamic", (False,), source, False)
    checks.require_choice(weights, "strategy", ("channel", "tensor", "block"), source)
    if weights["strategy"] == "block":
        return _parse_block(weights, "block_structure", source)
    return (1 if weights["strategy"] == "channel" else None), None


def _with_activations(scheme: FP8Scheme, group: Mapping[str, Any], source: str) -> FP8Scheme:
    """The scheme with the activations of a group."""
    found, columns = compressed_tensors.describe_activations(group, source), scheme.block[1]
    here = "strategy 'token'" if columns is None else f"groups of {columns}"
    if found == f"8-bit float with dynamic scales ({here})":
        return dataclasses.replace(scheme, activations="float8")
    if found == STATIC and columns is None:
        return dataclasses.replace(scheme, activations="float8", is_static=True)
    return dataclasses.replace(scheme, unsupported_activations=found)


def _parse_block(config: Mapping[str, Any], key: str, source: str) -> tuple[int, int]:
    block = config.get(key)
    if (
        not isinstance(block, list)
        or [type(size) for size in block] != [int, int]
        or block[0] < 1
        or block[1] != GROUP_SIZE
    ):
        raise CheckpointError(
            f"{source}: {key} is {block!r}: expected [128, 128]; scales of other than "
            f"{GROUP_SIZE} input channels can't be read"
        )
    return block[0], block[1]


@functools.partial(jax.jit, static_argnames=("size", "outputs"))
def _scales_of_channels(scales: jax.Array, *, size: int, outputs: int) -> jax.Array:
    """Scales float32 [groups, N] from [⌈N / size⌉, groups]: one for each of a block's channels."""
    return jnp.repeat(scales.astype(jnp.float32), size, axis=0)[:outputs].T


@jax.jit
def _any_nan(weight: jax.Array) -> jax.Array:
    return jnp.any(jnp.isnan(weight))

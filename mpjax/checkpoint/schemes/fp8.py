"""Reads and writes FP8 (e4m3) checkpoints: fine-grained, compressed-tensors', and ModelOpt's.

With K input and N output channels, a module has `weight` float8_e4m3fn [N, K] and scales: for each
block of output and input channels, `weight_scale_inv` or `weight_scale` [⌈N / block⌉, ⌈K / block⌉];
for each output channel, `weight_scale` [N, 1]; or one for all, [1].
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
from mpjax.checkpoint.schemes.compressed_tensors import (
    FLOATS,
    GLOBAL_SCALES,
    METHOD,
    NAIVE,
    PACKED_TENSORS,
)
from mpjax.checkpoint.schemes.reader import Activations, Reader
from mpjax.checkpoint.schemes.scheme import Scheme
from mpjax.checkpoint.schemes.tensors import Axes, Axis, Shape, Specs, Tensors
from mpjax.errors import CheckpointError
from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import is_known
from mpjax.kernels.codes import float8
from mpjax.precision import describe_weights

SOURCE = "quantization_config of an FP8 checkpoint"
FINE_GRAINED = "fp8"
SCALE_NAMES = {
    FINE_GRAINED: "weight_scale_inv",
    METHOD: "weight_scale",
    modelopt.METHOD: "weight_scale",
}
STATIC = "8-bit float with static scales (strategy 'tensor')"
OPERANDS = None, "float8"  # the precision chooses one
PLAIN, ROUNDED = (Activations(operand, operands=OPERANDS) for operand in OPERANDS)


@dataclasses.dataclass(frozen=True)
class FP8Reader(Reader):
    """FP8 weights (e4m3) with a scale for each block, each output channel, or each matrix.

    method: one of SCALE_NAMES, which name their tensors differently.
    block: output and input channels that share a scale; None for all.
    activations: `float8` with a scale for each token (and group of a block's input channels) or
        with the file's scale; or 16 bits.
    """

    suffixes: ClassVar[tuple[str, ...]] = (
        *("weight", *dict.fromkeys(SCALE_NAMES.values())),
        static_activations.SUFFIX,
    )

    method: str
    block: tuple[int | None, int | None]
    activations: Activations = PLAIN

    @property
    def scale_name(self) -> str:
        """The suffix of the scales beside a module's `weight`."""
        return SCALE_NAMES[self.method]

    @classmethod
    def holds(cls, specs: Specs) -> bool:
        """Whether a module has an FP8 weight, or a tensor named as FP8 scales are."""
        dtype = str(specs["weight"].dtype) if "weight" in specs else ""
        if dtype.startswith("float8") or SCALE_NAMES[FINE_GRAINED] in specs:
            return True
        has_integers = dtype == "int8" or any(suffix in specs for suffix in PACKED_TENSORS)
        has_others = has_integers or any(suffix in specs for suffix in GLOBAL_SCALES)
        return SCALE_NAMES[METHOD] in specs and not has_others

    @property
    def weights(self) -> WeightFormat:
        """The format of all modules."""
        return WeightFormat("float8", self.block[1], operand=self.activations.operand)

    def check(self, specs: Specs, name: str, shape: Shape | None = None) -> Shape:
        """Checks a module's tensors by shape and dtype and returns its (K, N)."""
        if "weight" not in specs or len(specs["weight"].shape) != 2:
            raise CheckpointError(
                f"{name} has no tensor weight that is a matrix: expected FP8 [N, K]"
            )
        outputs, channels = specs["weight"].shape
        checks.check_weight_shape(name, (channels, outputs), shape, None)
        size = self.block[0]
        groups = self.weights.groups(channels)  # the last group may be partial
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
        if self.activations.are_static:
            static_activations.check(specs, name)
        return channels, outputs

    def _grid_of_modelopt(self, grid: tuple[int, ...], specs: Specs) -> tuple[int, ...]:
        """The shape of ModelOpt's scales: [], [N], or that of blocks with or without axes of 1."""
        if self.block[1] is None:
            return grid[:-1]
        found = specs[self.scale_name].shape if self.scale_name in specs else ()
        return grid if len(found) == 2 else (grid[0], 1, grid[1], 1)

    @property
    def axes(self) -> dict[str, Axes]:
        """The axes of the tensors: weights [output, input channels], scales by block."""
        rows, columns = self.block
        scales = Axes(
            None if columns is None else Axis(1, columns), None if rows is None else Axis(0, rows)
        )
        return {"weight": Axes(Axis(1), Axis(0)), self.scale_name: scales}

    def decode(self, tensors: Tensors, name: str, shape: Shape | None = None) -> PlainCodes:
        """Decodes one module: codes float8_e4m3fn [K, N] with scales float32 [groups, N].

        Raises CheckpointError as `check` does, and for NaN, which kernels would decode to a number.
        """
        channels, outputs = self.check(tensors, name, shape)
        weight = jnp.asarray(tensors["weight"])
        if is_known(weight) and bool(_any_nan(weight)):
            raise CheckpointError(
                f"{name}.weight has weights that are NaN: the checkpoint is damaged"
            )
        scales = jnp.asarray(tensors[self.scale_name])
        checks.check_scales(name, scales)  # before repetition, to count each once
        scales = scales.reshape(-1, self.weights.groups(channels))
        size = min(self.block[0] or outputs, outputs)
        scales = _scales_of_channels(scales, size=size, outputs=outputs)
        scale = static_activations.read(tensors, name) if self.activations.are_static else None
        return PlainCodes(self.weights, weight.T, scales, activation_scale=scale)


def read(config: Mapping[str, Any]) -> FP8Reader:
    """Reads a `quantization_config`. Raises CheckpointError for an unsupported layout."""
    readers = {FINE_GRAINED: _fine_grained, METHOD: _compressed_tensors, modelopt.METHOD: _modelopt}
    return readers[checks.method_of(config)](config)


def matches(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of this format."""
    method = checks.method_of(config)
    if method == modelopt.METHOD:
        return modelopt.algorithm(config) in modelopt.FP8_ALGORITHMS
    return method == FINE_GRAINED or compressed_tensors.is_layout(config, FLOATS)


def write(layout: str, modules: writing.Modules) -> writing.Writer:
    """The writer of FP8 with scales per output channel, or per block of 128 × 128 channels."""
    writing.require_codes(layout, modules, ("float8",))
    format = writing.only_format(layout, modules)
    size, is_static = format.group_size, layout == FLOATS and writing.are_static(layout, modules)
    if layout == FINE_GRAINED and (size is None or format.operand is None):
        raise ValueError(
            f"format {layout!r} holds blocks of {float8.GROUP} input channels that meet FP8 "
            f"activations, WFP8g128AFP8, and the weights are {describe_weights(format)}: "
            f"export as {FLOATS!r}"
        )

    def config(plain: Sequence[str], cache: str | None) -> dict[str, Any]:
        block = [float8.GROUP, float8.GROUP]
        if layout == FINE_GRAINED:
            return {
                "quant_method": FINE_GRAINED,
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": block,
                "modules_to_not_convert": list(plain),
            }
        weights = compressed_tensors.write_weights(
            *(8, "float", "channel" if size is None else "block"),
            block_structure=None if size is None else block,
        )
        activations = Activations(format.operand, is_static)
        written = compressed_tensors.write_activations("float", activations, size)
        group = compressed_tensors.write_group(weights, written)
        return compressed_tensors.write(FLOATS, [group], plain, cache)

    scale_name = SCALE_NAMES[METHOD if layout == FLOATS else layout]
    return writing.Writer(config, functools.partial(_encode, scale_name))


SCHEME = Scheme(
    title="FP8",
    article="an",
    methods=tuple(SCALE_NAMES),
    reader=FP8Reader,
    read=read,
    matches=matches,
    ignored=(
        "activation_scale",  # static activation scales beside block-wise weights
        *("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt's, if the cache is not FP8
    ),
    writing=writing.Writing((FLOATS, FINE_GRAINED), write, default_for=("float8",)),
)


def _encode(scale_name: str, plain: PlainCodes, name: str) -> dict[str, Any]:
    """The tensors of one module. Raises ValueError if scales differ within a block."""
    outputs = plain.shape[1]
    size = min(plain.format.group_size or 1, outputs)
    scales = plain.scales.T[::size]
    again = _scales_of_channels(scales, size=size, outputs=outputs)
    if is_known(again) and not bool(jnp.all(again == plain.scales)):
        raise ValueError(
            f"{name} has scales that differ within a block of {size} output channels, which no "
            "format that others read can hold: quantise to WFP8gKA16, with a scale for each "
            f"output channel, or {writing.REMEDY}"
        )
    return {"weight": plain.codes.T, scale_name: scales, **static_activations.written(plain)}


def _fine_grained(config: Mapping[str, Any]) -> FP8Reader:
    checks.require_choice(config, "fmt", ("e4m3",), SOURCE, "e4m3")
    checks.require_choice(config, "scale_fmt", ("float",), SOURCE, "float")
    checks.require_choice(config, "activation_scheme", ("dynamic", "static"), SOURCE, "dynamic")
    block = _parse_block(config, "weight_block_size", SOURCE)
    if config.get("activation_scheme") != "static":
        return FP8Reader(FINE_GRAINED, block, ROUNDED)
    return FP8Reader(FINE_GRAINED, block, PLAIN._replace(unsupported="FP8 with static scales"))


def _modelopt(config: Mapping[str, Any]) -> FP8Reader:
    algorithm = modelopt.algorithm(config)
    if algorithm == modelopt.FP8_BLOCKS:
        return FP8Reader(modelopt.METHOD, (float8.GROUP, float8.GROUP))
    is_static = algorithm == modelopt.FP8
    rows = None if is_static else 1
    return FP8Reader(modelopt.METHOD, (rows, None), ROUNDED._replace(is_static=is_static))


def _compressed_tensors(config: Mapping[str, Any]) -> FP8Reader:
    group, source = compressed_tensors.read_only_group(config, (FLOATS, NAIVE), SOURCE)
    block = _parse_weights(group.get("weights"), f"{source}, weights")
    here = "strategy 'token'" if block[1] is None else f"groups of {block[1]}"
    activations = compressed_tensors.read_activations(
        *(group, source, ROUNDED),
        dynamic=f"8-bit float with dynamic scales ({here})",
        static=None if block[1] else STATIC,
    )
    return FP8Reader(METHOD, block, activations)


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


def _parse_block(config: Mapping[str, Any], key: str, source: str) -> tuple[int, int]:
    block = config.get(key)
    if (
        not isinstance(block, list)
        or [type(size) for size in block] != [int, int]
        or block[0] < 1
        or block[1] != float8.GROUP
    ):
        raise CheckpointError(
            f"{source}: {key} is {block!r}: expected [128, 128]; scales of other than "
            f"{float8.GROUP} input channels can't be read"
        )
    return block[0], block[1]


@functools.partial(jax.jit, static_argnames=("size", "outputs"))
def _scales_of_channels(scales: jax.Array, *, size: int, outputs: int) -> jax.Array:
    """Repeats block scales [⌈N / size⌉, groups] for each output channel: float32 [groups, N]."""
    return jnp.repeat(scales.astype(jnp.float32), size, axis=0)[:outputs].T


@jax.jit
def _any_nan(weight: jax.Array) -> jax.Array:
    return jnp.any(jnp.isnan(weight))

"""Reads the `quantization_config` of FP8 checkpoints, as two quantisers write it.

`fp8` is the fine-grained format of DeepSeek-V3 and of Qwen's FP8 models; source: transformers,
utils/quantization_config.py (FineGrainedFP8Config). `compressed-tensors` is llm-compressor's;
source: compressed-tensors, quantization/quant_args.py and quantization/quant_scheme.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat

SOURCE = "quantization_config of an FP8 checkpoint"
SCALE_NAMES = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}
GROUP_SIZE = 128  # input channels, of the blocks that there are kernels for


@dataclasses.dataclass(frozen=True)
class FP8Config:
    """The part of an FP8 `quantization_config` that weights and their products depend on.

    method: `fp8` or `compressed-tensors`, which name their tensors differently.
    block: output and input channels that share a scale; None means all of them.
    activations: what products round activations to, on the fly, with a scale for each token (and
        each of a block's input channels): `float8`, or None for 16-bit activations.
    unsupported: in words, the activations that the checkpoint was made for, where there are none
        such here, so that somebody has to choose others; None where `activations` says it.
    has_cache_scales: that there are scales for an FP8 cache, too.

    `modules_to_not_convert` and `ignore` are not needed: a module's tensors say whether it is FP8.
    """

    method: str
    block: tuple[int | None, int | None]
    activations: str | None
    unsupported: str | None = None
    has_cache_scales: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FP8Config:
        """Reads config.json's `quantization_config`.

        Raises CheckpointError when it isn't FP8, or FP8 in a layout that can't be read.
        """
        method = config.get("quant_method")
        if method == "fp8":
            return _fine_grained(config)
        if method == "compressed-tensors":
            return _compressed_tensors(config)
        raise CheckpointError(
            f"{SOURCE}: quant_method is {method!r}: expected {' or '.join(map(repr, SCALE_NAMES))}"
        )

    @property
    def scale_name(self) -> str:
        """The name of the tensor beside a module's `weight`."""
        return SCALE_NAMES[self.method]

    @property
    def format(self) -> WeightFormat:
        """The format of the weights on the device."""
        return WeightFormat("float8", self.block[1], activations=self.activations)


def _fine_grained(config: Mapping[str, Any]) -> FP8Config:
    _require(config, "fmt", ("e4m3",), SOURCE, "e4m3")
    _require(config, "scale_fmt", ("float",), SOURCE, "float")
    _require(config, "activation_scheme", ("dynamic", "static"), SOURCE, "dynamic")
    block = _parse_block(config, "weight_block_size", SOURCE)
    if config.get("activation_scheme") == "static":
        return FP8Config("fp8", block, None, "FP8 with static scales")
    return FP8Config("fp8", block, "float8")


def _compressed_tensors(config: Mapping[str, Any]) -> FP8Config:
    layouts = ("float-quantized", "naive-quantized")  # the same for FP8
    _require(config, "format", layouts, SOURCE)
    if config.get("transform_config"):
        raise CheckpointError(
            f"{SOURCE}: there is a transform_config: checkpoints with one can't be read"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(f"{SOURCE}: config_groups is {groups!r}: expected a map of groups")
    parsed = {}
    for name, group in groups.items():
        source = f"{SOURCE}, group {name!r}"
        if not isinstance(group, Mapping):
            raise CheckpointError(f"{source} is {group!r}: expected an object")
        _require(group, "format", layouts, source, layouts[0])
        _require(group, "output_activations", (None,), source)
        block = _parse_weights(group.get("weights"), f"{source}, weights")
        activations = _parse_activations(group.get("input_activations"), block, source)
        parsed[name] = FP8Config("compressed-tensors", block, *activations)
    if len(set(parsed.values())) > 1:
        raise CheckpointError(
            f"{SOURCE}: config_groups {', '.join(parsed)} differ: expected one scheme for all"
        )
    has_cache_scales = _check_cache(config.get("kv_cache_scheme"))
    return dataclasses.replace(next(iter(parsed.values())), has_cache_scales=has_cache_scales)


def _check_cache(scheme: Any) -> bool:
    """Whether there is a scheme, which must be FP8 with static scales of tensors or heads."""
    if not scheme:
        return False
    source = f"{SOURCE}, kv_cache_scheme"
    if not isinstance(scheme, Mapping):
        raise CheckpointError(f"{source} is {scheme!r}: expected an object")
    _require(scheme, "type", ("float",), source)
    _require(scheme, "num_bits", (8,), source)
    _require(scheme, "symmetric", (True,), source, True)
    _require(scheme, "dynamic", (False,), source, False)
    _require(scheme, "strategy", ("tensor", "attn_head"), source)
    return True


def _parse_weights(weights: Any, source: str) -> tuple[int | None, int | None]:
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{source} is {weights!r}: expected an object")
    _require(weights, "type", ("float",), source)
    _require(weights, "num_bits", (8,), source)
    _require(weights, "symmetric", (True,), source, True)
    _require(weights, "dynamic", (False,), source, False)
    _require(weights, "strategy", ("channel", "tensor", "block"), source)
    if weights["strategy"] == "block":
        return _parse_block(weights, "block_structure", source)
    return (1 if weights["strategy"] == "channel" else None), None


def _parse_activations(
    written: Any, block: tuple[int | None, int | None], source: str
) -> tuple[str | None, str | None]:
    """The fields `activations` and `unsupported`."""
    if not written:
        return None, None
    if not isinstance(written, Mapping):
        raise CheckpointError(f"{source}, input_activations is {written!r}: expected an object")
    kind = f"{written.get('num_bits')}-bit {written.get('type')}"
    strategy = written.get("strategy")
    size = written.get("group_size") if strategy == "group" else None
    if written.get("dynamic") is not True:
        return None, f"{kind} with static scales"
    if kind != "8-bit float" or strategy not in ("token", "group") or size != block[1]:
        of = f"groups of {size}" if size else f"strategy {strategy!r}"
        return None, f"{kind} with dynamic scales ({of})"
    return "float8", None


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


def _require(
    config: Mapping[str, Any],
    key: str,
    supported: tuple[Any, ...],
    source: str,
    default: Any = None,
) -> None:
    value = config.get(key)
    value = default if value is None else value
    if value not in supported:
        expected = " or ".join(repr(choice) for choice in supported)
        raise CheckpointError(f"{source}: {key} is {value!r}: expected {expected}")

"""Reads a GPTQ `quantization_config`, with its rules for single modules (`dynamic`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint import packed_module
from mpjax.errors import CheckpointError

SOURCE = "quantization_config of a GPTQ checkpoint"
SUPPORTED_BITS = (4, 8)
SUPPORTED_FORMATS = ("gptq", "gptq_v2")


@dataclasses.dataclass(frozen=True)
class DynamicRule:
    """What GPTQModel did otherwise for modules whose path a pattern matches from its start.

    bits, group_size, symmetric: as in GPTQConfig, already completed from the checkpoint's own.
    quantized: False for modules that were left in 16 bits.
    """

    pattern: re.Pattern[str]
    quantized: bool
    bits: int
    group_size: int | None
    symmetric: bool | None


@dataclasses.dataclass(frozen=True)
class GPTQConfig:
    """The part of a GPTQ `quantization_config` that decoding depends on.

    bits: 4 or 8. group_size: input channels per group; None means one group of all.
    checkpoint_format: `gptq` (v1, zero points stored minus 1) or `gptq_v2`.
    desc_act: whether channels were quantised in order of activation (act-order).
    static_groups: whether groups were fixed before act-order, and so stay in order.
    symmetric: whether all zero points are 2**(bits − 1); None where the file does not say.
    dynamic: rules for single modules, of which the first that matches counts.
    """

    bits: int
    group_size: int | None
    checkpoint_format: str = "gptq"
    desc_act: bool = False
    static_groups: bool = False
    symmetric: bool | None = None
    dynamic: tuple[DynamicRule, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GPTQConfig:
        """Reads config.json's `quantization_config`.

        Raises CheckpointError when it isn't GPTQ, or has bits or a layout that can't be read.
        """
        method = config.get("quant_method", config.get("method"))
        if method != "gptq":
            raise CheckpointError(f"{SOURCE}: quant_method is {method!r}: expected 'gptq'")
        # GPTQModel writes the layout under both names; older writers under the first, or nowhere.
        keys = [k for k in ("checkpoint_format", "format") if config.get(k) is not None]
        formats = {str(config[key]).lower() for key in keys} or {"gptq"}
        if packed_module.parse_switch(config, "is_marlin_format", SOURCE):
            formats = {"marlin"}
        for unknown in sorted(formats - set(SUPPORTED_FORMATS)):
            raise CheckpointError(
                f"{SOURCE}: the layout {unknown!r} (checkpoint_format) is not supported: "
                f"only {' and '.join(SUPPORTED_FORMATS)} are"
            )
        if len(formats) > 1:
            raise CheckpointError(
                f"{SOURCE}: checkpoint_format is {config['checkpoint_format']!r} and format is "
                f"{config['format']!r}: expected them to agree"
            )
        if str(config.get("pack_dtype") or "int32") != "int32":
            raise CheckpointError(
                f"{SOURCE}: pack_dtype is {config['pack_dtype']!r}: only int32 words are supported"
            )
        bits = _parse_bits(config, SOURCE)
        group_size = packed_module.parse_group_size(config, ("group_size",), SOURCE)
        symmetric = packed_module.parse_switch(config, "sym", SOURCE)
        meta = config.get("meta") or {}
        if not isinstance(meta, Mapping):
            raise CheckpointError(f"{SOURCE}: meta is {meta!r}: expected an object")
        static_groups = packed_module.parse_switch(config, "static_groups", SOURCE)
        if static_groups is None:
            static_groups = packed_module.parse_switch(meta, "static_groups", f"{SOURCE}, meta")
        return cls(
            bits,
            group_size,
            formats.pop(),
            packed_module.parse_switch(config, "desc_act", SOURCE) or False,
            static_groups or False,
            symmetric,
            _parse_dynamic(config.get("dynamic") or {}, bits, group_size, symmetric),
        )

    def for_module(self, name: str) -> GPTQConfig | None:
        """The config of one module after `dynamic` rules; None if it was left in 16 bits.

        name: the module's path, such as `model.layers.0.mlp.down_proj`.
        """
        for rule in self.dynamic:
            if rule.pattern.match(name):
                if not rule.quantized:
                    return None
                return dataclasses.replace(
                    self,
                    bits=rule.bits,
                    group_size=rule.group_size,
                    symmetric=rule.symmetric,
                    dynamic=(),
                )
        return self


def _parse_bits(config: Mapping[str, Any], source: str) -> int:
    bits = packed_module.parse_integer(config, ("bits",), source)
    if bits not in SUPPORTED_BITS:
        raise CheckpointError(f"{source}: bits is {bits}: only 4 and 8 bits are supported")
    return bits


def _parse_dynamic(
    rules: Any, bits: int, group_size: int | None, symmetric: bool | None
) -> tuple[DynamicRule, ...]:
    """Reads `dynamic`: patterns with `-:` leave modules out, with `+:` or nothing change them."""
    if not isinstance(rules, Mapping):
        raise CheckpointError(f"{SOURCE}: dynamic is {rules!r}: expected a map of patterns")
    parsed = []
    for key, overrides in rules.items():
        source = f"{SOURCE}, dynamic rule {key!r:.80}"
        expression = key[2:] if key.startswith(("-:", "+:")) else key
        try:
            pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{source} is not a regular expression: {error}") from error
        overrides = overrides or {}
        if not isinstance(overrides, Mapping):
            raise CheckpointError(f"{source} is {overrides!r}: expected a map of settings")
        if key.startswith("-:"):
            parsed.append(DynamicRule(pattern, False, bits, group_size, symmetric))
            continue
        for forbidden in ("method", "quant_method", "format", "checkpoint_format", "pack_dtype"):
            if forbidden in overrides:
                raise CheckpointError(
                    f"{source} sets {forbidden}: only bits, group_size and sym may differ by module"
                )
        parsed.append(
            DynamicRule(
                pattern,
                True,
                _parse_bits(overrides, source) if "bits" in overrides else bits,
                packed_module.parse_group_size(overrides, ("group_size",), source)
                if "group_size" in overrides
                else group_size,
                packed_module.parse_switch(overrides, "sym", source)
                if "sym" in overrides
                else symmetric,
            )
        )
    return tuple(parsed)

"""Translates AutoRound's `quantization_config` to that of the packing it uses.

By `packing_format`: `auto_round:auto_gptq` is GPTQ, with zero points stored minus 1; `auto_round`
and `auto_round:gptqmodel` are GPTQ v2, with unchanged zero points; `auto_round:auto_awq` is AWQ's
gemm layout; `auto_round:llm_compressor` is compressed-tensors, with its own keys. `extra_config`
overrides the bits of single modules. Source: AutoRound, auto_round/inference/convert_model.py and
auto_round/export.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint.schemes import checks
from mpjax.errors import CheckpointError

METHODS = ("auto-round", "intel/auto-round")
SOURCE = "quantization_config of an AutoRound checkpoint"
GPTQ_FORMATS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_round": "gptq_v2",
}
AWQ, COMPRESSED_TENSORS = "auto_round:auto_awq", "auto_round:llm_compressor"


def translate(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `quantization_config` of GPTQ, AWQ or compressed-tensors for AutoRound's.

    Configs of other methods are returned unchanged. Raises CheckpointError for an unsupported
    `packing_format` or `data_type`.
    """
    if checks.method_of(config) not in METHODS:
        return config
    known = (*GPTQ_FORMATS, AWQ, COMPRESSED_TENSORS)
    packing = config.get("packing_format", "auto_round")
    packing = str(packing).replace("auto-round", "auto_round")
    if packing not in known:
        raise CheckpointError(
            f"{SOURCE}: packing_format is {packing!r:.80}: expected {', '.join(known)}"
        )
    if packing == COMPRESSED_TENSORS:
        return {**config, "quant_method": "compressed-tensors"}
    checks.require_choice(config, "data_type", ("int",), SOURCE, "int")
    found = {key: config[key] for key in ("bits", "group_size", "sym") if key in config}
    if packing == AWQ:
        zero_point = checks.parse_switch(config, "sym", SOURCE) is not True
        return {**found, "quant_method": "awq", "version": "gemm", "zero_point": zero_point}
    return {
        **found,
        "quant_method": "gptq",
        "checkpoint_format": GPTQ_FORMATS[packing],
        "desc_act": False,
        "dynamic": _rules(config.get("extra_config")),
    }


def _rules(extra: Any) -> dict[str, dict[str, Any]]:
    """AutoRound's settings of single modules as GPTQModel's `dynamic` rules."""
    if extra is None:
        return {}
    where = f"{SOURCE}, extra_config"
    if not isinstance(extra, Mapping):
        raise CheckpointError(f"{where} is {extra!r:.80}: expected an object")
    rules = {}
    for name, settings in extra.items():
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{where}, {name!r:.80} is {settings!r:.80}: expected an object")
        is_plain = type(bits := settings.get("bits")) is int and bits >= 16
        kept = {key: settings[key] for key in ("bits", "group_size", "sym") if key in settings}
        rules[f"{'-' if is_plain else '+'}:{re.escape(name)}$"] = {} if is_plain else kept
    return rules

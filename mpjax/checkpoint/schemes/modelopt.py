"""Reads the `quantization_config` of NVIDIA Model Optimizer checkpoints, for all formats.

Older checkpoints have it under `quantization` in hf_quant_config.json. Source: TensorRT Model
Optimizer, torch/export/convert_hf_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mpjax.errors import CheckpointError

METHOD = "modelopt"
SOURCE = "quantization_config of a ModelOpt checkpoint"
FP8, FP8_CHANNELS, FP8_BLOCKS = FP8_ALGORITHMS = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"
ALIASES = {"FP8_BLOCK_SCALES": FP8_BLOCKS}
MIXED = "MIXED_PRECISION"
READ = (*FP8_ALGORITHMS, "NVFP4", "W4A16_NVFP4")


def algorithm(config: Mapping[str, Any], source: str = SOURCE) -> str:
    """The quantisation algorithm of a ModelOpt checkpoint or module, in capitals.

    source: for messages. Raises CheckpointError for an unsupported algorithm.
    """
    name = _algorithm(config)
    if name not in READ:
        raise CheckpointError(
            f"{source}: quant_algo is {config.get('quant_algo')!r:.80}: expected "
            f"{', '.join((*READ, MIXED))}; load another checkpoint of the model"
        )
    return name


def _algorithm(config: Mapping[str, Any]) -> str:
    name = str(config.get("quant_algo")).upper()
    return ALIASES.get(name, name)


def has_cache_scales(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint may have scales for an FP8 cache."""
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return str(config.get("kv_cache_quant_algo")).upper() == FP8


def split(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]] | None:
    """(targets, `quantization_config`) of each algorithm, if `quant_algo` is MIXED_PRECISION.

    None for a config with one algorithm. Raises CheckpointError if a config with several doesn't
    list its modules.
    """
    if _algorithm(config) != MIXED:
        return None
    layers, where = config.get("quantized_layers"), f"{SOURCE}, quantized_layers"
    if not isinstance(layers, Mapping) or not layers:
        raise CheckpointError(f"{where} is {layers!r:.80}: expected the algorithm of each module")
    targets: dict[str, list[str]] = {}
    for name, settings in layers.items():
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{where}, {name!r:.80} is {settings!r:.80}: expected an object")
        found = algorithm(settings, f"{where}, {name!r:.80}")
        pattern = "re:" + re.escape(name).replace(r"\*", ".*") + "$"
        targets.setdefault(found, []).append(pattern if "*" in name else name)
    return [(tuple(names), {**config, "quant_algo": name}) for name, names in targets.items()]


def from_older(written: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a hf_quant_config.json, or None."""
    found = written.get("quantization")
    return {**found, "quant_method": METHOD} if isinstance(found, Mapping) else None

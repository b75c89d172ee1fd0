"""The `quantization_config` of checkpoints of NVIDIA's Model Optimizer, in all of its formats.

Older checkpoints have it in hf_quant_config.json, under `quantization`. Source: TensorRT Model
Optimizer, torch/export/convert_hf_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint.schemes import checks
from mpjax.errors import CheckpointError

METHOD = "modelopt"
SOURCE = "quantization_config of a ModelOpt checkpoint"
FP8 = "FP8"
READ = (FP8, "NVFP4", "W4A16_NVFP4")


def algorithm(config: Mapping[str, Any]) -> str:
    """The algorithm of a ModelOpt checkpoint. Raises CheckpointError for one that is not read."""
    checks.require_choice(config, "quant_method", (METHOD,), SOURCE)
    name = config.get("quant_algo")
    if name not in READ:
        raise CheckpointError(
            f"{SOURCE}: quant_algo is {name!r:.80}: expected {', '.join(READ)}; load another "
            "checkpoint of the model"
        )
    return str(name)


def from_older(written: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a hf_quant_config.json; None where it has none."""
    found = written.get("quantization")
    return {**found, "quant_method": METHOD} if isinstance(found, Mapping) else None

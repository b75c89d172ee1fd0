"""Random adapters' folders in PEFT's form, for tests without PEFT: numpy and safetensors only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.mpjax.checkpoint.write_checkpoint import linear_shapes

BEFORE = "base_model.model."


def write_adapter(
    folder: Path,
    hf: dict[str, Any],
    seed: int = 0,
    rank: int = 4,
    leaves: Sequence[str] = ("q_proj", "v_proj", "down_proj"),
    **keys: Any,
) -> Path:
    """Writes an adapter of a Llama's modules whose names end with `leaves`.

    keys: of adapter_config.json.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for module, (inputs, outputs) in linear_shapes(hf).items():
        if module.rpartition(".")[2] in leaves:
            down, up = rng.normal(0, 0.3, (rank, inputs)), rng.normal(0, 0.3, (outputs, rank))
            tensors[f"{BEFORE}{module}.lora_A.weight"] = down.astype(np.float32)
            tensors[f"{BEFORE}{module}.lora_B.weight"] = up.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank} | keys
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

"""Random checkpoints of mixtures of experts, one Linear for each expert, as Mixtral's files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpjax.models.registry import FAMILIES
from tests.models.sharded_families import keys
from tests.mpjax.checkpoint.write_checkpoint import write_checkpoint


def write_mixture(folder: Path, rng: np.random.Generator, **changes: Any) -> dict[str, np.ndarray]:
    """Writes a Mixtral in bfloat16, with changes to its config.json; returns its tensors."""
    hf = keys("MixtralForCausalLM") | {"torch_dtype": "bfloat16"} | changes
    decoder = FAMILIES["MixtralForCausalLM"]
    config = decoder.config_from_hf(hf)
    shapes = {place.name: place.shape for place in decoder.array_places(config)}
    for place in decoder.linear_places(config):
        for linear, (inputs, outputs) in zip(place.names, place.shapes, strict=True):
            shapes[f"{linear}.weight"] = (outputs, inputs)
    tensors = {
        key: rng.random(shape, np.float32).astype(ml_dtypes.bfloat16)
        for key, shape in shapes.items()
    }
    write_checkpoint(folder, hf, tensors)
    return tensors

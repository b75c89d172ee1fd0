"""Writes a trained `mpjax.models.Llama` as a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from mpjax.models import Llama


def hugging_face_tensors(model: Llama) -> dict[str, NDArray[Any]]:
    """The weights in bfloat16, by the names and in the layout of `LlamaForCausalLM`.

    Linear maps become [out, in], and the fused ones are split. A tied head is left out, as
    Hugging Face does.
    """
    tensors: dict[str, Any] = {
        place.name: place.read(model) for place in model.array_places(model.config)
    }
    for place in model.linear_places(model.config):
        [kernel] = place.kernels(model)
        ends = np.cumsum([outputs for _, outputs in place.shapes])[:-1]
        parts = np.split(np.asarray(kernel), ends, axis=1)
        tensors |= {f"{name}.weight": part.T for name, part in zip(place.names, parts, strict=True)}
    return {
        # safetensors writes a buffer as it lies in memory, so a transposed view would be garbled.
        name: np.ascontiguousarray(np.asarray(tensor).astype(ml_dtypes.bfloat16))
        for name, tensor in tensors.items()
    }


def write_checkpoint(model: Llama, config: Mapping[str, Any], folder: Path) -> None:
    """Write `model.safetensors`, `config.json` (`config`) and `generation_config.json`.

    `folder` is created if it is missing. The tokeniser's files are not written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses a file whose metadata does not name its framework.
    content = save(hugging_face_tensors(model), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)
    write_json(config, folder / "config.json")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(ids, folder / "generation_config.json")


def write_json(value: Mapping[str, Any], file: Path) -> None:
    """Write `value` indented, with a final line break."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

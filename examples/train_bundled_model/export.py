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
        "model.embed_tokens.weight": model.embedding.get_value(),
        "model.norm.weight": model.norm.weight.get_value(),
    }
    if model.head is not None:
        tensors["lm_head.weight"] = model.head.get_value()
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.attention, layer.mlp
        maps = {
            **_split(attention.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            "self_attn.o_proj": attention.output.kernel.get_value(),
            **_split(mlp.gate_up, ("mlp.gate_proj", "mlp.up_proj")),
            "mlp.down_proj": mlp.down.kernel.get_value(),
        }
        weights = {name: kernel.T for name, kernel in maps.items()}
        weights["input_layernorm"] = layer.attention_norm.weight.get_value()
        weights["post_attention_layernorm"] = layer.mlp_norm.weight.get_value()
        for name, weight in weights.items():
            tensors[f"model.layers.{index}.{name}.weight"] = weight
    return {
        # safetensors writes a buffer as it lies in memory, so a transposed view would be garbled.
        name: np.ascontiguousarray(np.asarray(tensor).astype(ml_dtypes.bfloat16))
        for name, tensor in tensors.items()
    }


def write_checkpoint(model: Llama, config: Mapping[str, Any], folder: Path) -> None:
    """Write `model.safetensors`, `config.json` (`config`) and `generation_config.json`.

    `folder` is created where it is missing. The tokeniser's files are not this function's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # transformers refuses a file that does not say which framework it is laid out for.
    content = save(hugging_face_tensors(model), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(content)
    write_json(config, folder / "config.json")
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(ids, folder / "generation_config.json")


def write_json(value: Mapping[str, Any], file: Path) -> None:
    """Write `value` indented, with a final line break."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _split(fused: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The kernel [in, out] of each of the maps that `fused` computes as one."""
    [part] = fused.parts
    ends = np.cumsum(fused.sizes)[:-1]
    kernels = np.split(np.asarray(part.kernel.get_value()), ends, axis=1)
    return dict(zip(names, kernels, strict=True))

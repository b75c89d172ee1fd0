"""Architectures without experts and recurrent layers: keys of config.json.

Source: llama.cpp, gguf-py/gguf/constants.py, its conversion of Hugging Face's files, and
src/models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

# Number of layers of Gemma's 27B models, whose scores aren't scaled by 1 / √head_dim.
GEMMA_27B = {"gemma2": 46, "gemma3": 62}


def gemma(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Gemma 1, 2 and 3."""
    name = metadata.text("general.architecture")
    heads, hidden = (
        metadata.whole(f"{name}.{key}") for key in ("attention.head_count", "embedding_length")
    )
    size = metadata.whole(f"{name}.attention.key_length", hidden // max(heads, 1))
    if metadata.whole(f"{name}.block_count") == GEMMA_27B.get(name):
        size = hidden / max(heads, 1)
    found: dict[str, Any] = {"query_pre_attn_scalar": size}
    if name == "gemma":
        return {}
    optional = {
        "sliding_window": metadata.whole(
            f"{name}.attention.sliding_window", 0 if name == "gemma3" else None
        ),
        "final_logit_softcapping": metadata.number(f"{name}.final_logit_softcapping", None),
    }
    if name == "gemma3":
        theta = metadata.number(f"{name}.rope.freq_base_swa", 10000.0)
        every = metadata.whole(f"{name}.attention.sliding_window_pattern", 6)
        found |= {"rope_local_base_freq": theta, "sliding_window_pattern": every}
    else:
        optional["attn_logit_softcapping"] = metadata.number(f"{name}.attn_logit_softcapping", None)
    # 0 means no window or cap, which is null in config.json.
    return found | {key: value or None for key, value in optional.items() if value is not None}


def granite(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Granite's config.json. Raises CheckpointError without RoPE."""
    name = metadata.text("general.architecture")
    if not metadata.flag(f"{name}.rope.scaling.finetuned", True):
        raise CheckpointError(
            f"{metadata.path}: {name}.rope.scaling.finetuned is false, by which llama.cpp knows a "
            "Granite without a rotary embedding: expected true"
        )
    return biases(metadata, tensors) | multipliers(metadata)


def multipliers(metadata: Metadata) -> dict[str, Any]:
    """Granite's factors of the embedding, scores, residual sums and logits."""
    name = metadata.text("general.architecture")
    keys = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {key: metadata.number(f"{name}.{written}") for key, written in keys.items()}


def phi3(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Phi-3's config.json."""
    found: dict[str, Any] = {}
    heads = metadata.whole("phi3.attention.head_count")
    whole = metadata.whole("phi3.embedding_length") // max(heads, 1)
    rotated = metadata.whole("phi3.rope.dimension_count", whole)
    if rotated != whole:
        found["partial_rotary_factor"] = rotated / max(whole, 1)
    if (window := metadata.whole("phi3.attention.sliding_window", 0)) > 0:
        found["sliding_window"] = window
    return found


def biases(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Whether attention and MLP have biases."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def seed_oss(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Seed-OSS's config.json."""
    return biases(metadata, tensors) | {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def ernie(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of ERNIE 4.5's config.json."""
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


def partial_rotation(metadata: Metadata) -> dict[str, Any]:
    """The share of a head's channels that are rotated. llama.cpp's default is all."""
    name = metadata.text("general.architecture")
    heads, hidden = (
        metadata.whole(f"{name}.{key}") for key in ("attention.head_count", "embedding_length")
    )
    whole = metadata.whole(f"{name}.attention.key_length", hidden // max(heads, 1))
    rotated = metadata.whole(f"{name}.rope.dimension_count", whole)
    return {"partial_rotary_factor": rotated / max(whole, 1)}


def windows(metadata: Metadata, every: int) -> dict[str, Any]:
    """`sliding_window`, and the kinds of layers if there is a window.

    every: the default of the pattern: each such layer has no window. A file may have a flag for
    each layer instead.
    """
    name = metadata.text("general.architecture")
    key, layers = f"{name}.attention.sliding_window_pattern", metadata.whole(f"{name}.block_count")
    if isinstance(metadata.values.get(key), np.ndarray):
        flags = [bool(flag) for flag in metadata.numbers(key, length=layers)]
    else:
        every = metadata.whole(key, every)
        flags = [not every or number % every < every - 1 for number in range(layers)]
    if (window := metadata.whole(f"{name}.attention.sliding_window", 0)) <= 0:
        return {"sliding_window": None}
    drafts = metadata.whole(f"{name}.nextn_predict_layers", 0)
    kinds = [("full", "sliding")[flag] + "_attention" for flag in flags[: layers - drafts]]
    return {"sliding_window": window, "layer_types": kinds}


def olmo(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of OLMo 2, or of OLMo 3 in files with windows."""
    found = windows(metadata, 4)
    if found["sliding_window"] is None:
        return {}
    return found | {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}


def cohere(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Command R and, with windows, of Command R7B and A."""
    name = metadata.text("general.architecture")
    scale = metadata.number(f"{name}.logit_scale", 0.0) or 1.0
    found = {"logit_scale": scale, "attention_bias": "blk.0.attn_q.bias" in tensors}
    return found | (windows(metadata, 4) if name == "cohere2" else {})


def exaone4(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of EXAONE 4's config.json."""
    return windows(metadata, 4)


def glm4(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of GLM-4's config.json. Raises CheckpointError for GLM-4V, whose rows are moved."""
    name = metadata.text("general.architecture")
    sections = metadata.numbers(f"{name}.rope.dimension_sections", None)
    if sections is not None and np.any(sections):
        raise CheckpointError(
            f"{metadata.path}: {name}.rope.dimension_sections is {[*sections]!r:.80}, as in the "
            "text model of GLM-4V: expected 0 for each; load the model's safetensors checkpoint"
        )
    return partial_rotation(metadata) | {"attention_bias": "blk.0.attn_q.bias" in tensors}


def starcoder2(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of StarCoder 2's config.json. Files don't name its window, which llama.cpp lacks."""
    return {"use_bias": "blk.0.attn_q.bias" in tensors, "sliding_window": None}


def apertus(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Apertus' config.json. Raises CheckpointError for other constants of xIELU."""
    for key, expected in (("beta", 0.5), ("eps", -1e-6)):
        found = np.atleast_1d(metadata.numbers(f"xielu.{key}", np.array([expected], np.float32)))
        if not np.allclose(found, expected, rtol=1e-2):  # eps is bfloat16 in Hugging Face's files
            raise CheckpointError(
                f"{metadata.path}: xielu.{key} is {found[0]}: expected {expected}, as in Apertus"
            )
    bias = "blk.0.attn_q.bias" in tensors
    # Its default is Llama 3's scaling, which files have as divisors of frequencies.
    return {"attention_bias": bias, "rope_parameters": {"rope_type": "default"}}


def xielu(metadata: Metadata) -> dict[str, np.ndarray]:
    """The learned numbers of Apertus' activation, float32 [1], by Hugging Face's tensor name."""
    layers = metadata.whole("apertus.block_count")
    return {
        f"model.layers.{layer}.mlp.act_fn.{key}": np.array([value], np.float32)
        for key in ("alpha_p", "alpha_n")
        for layer, value in enumerate(metadata.numbers(f"xielu.{key}", length=layers))
    }


def mistral3(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Ministral 3's config.json, or Mistral's for files whose queries don't grow."""
    if metadata.number("mistral3.attention.temperature_scale", 0.0):
        return {"sliding_window": None}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    }


def qwen_text(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Marks keys of Qwen2-VL and Qwen3-VL as known that matter only for images."""
    name = metadata.text("general.architecture")
    metadata.numbers(f"{name}.rope.dimension_sections", None)
    metadata.whole(f"{name}.n_deepstack_layers", 0)
    return {}

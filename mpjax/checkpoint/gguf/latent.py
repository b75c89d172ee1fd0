"""Multi-head latent attention in GGUF files: DeepSeek-V2 and V3, GLM-4.7-Flash, Mistral Small 4.

Source: llama.cpp, conversion/deepseek.py and src/models/deepseek2.cpp. Newer files hold the two
halves of Hugging Face's `kv_b_proj` apart: of keys, transposed, `attn_k_b` [heads, latent, key
channels], and of values `attn_v_b` [heads, value channels, latent]. Their `attention.key_length`
and `attention.value_length` are those of cached latents, and the sizes of heads are in
`key_length_mla` and `value_length_mla`. Older files have one map, `attn_kv_b`, and only sizes of
heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.checkpoint.gguf.blocks import TensorType
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.mixtures import (
    CORRECTION,
    SIGMOID,
    SOFTMAX,
    grouped_keys,
    require_scores,
)
from mpjax.checkpoint.gguf.names import NAMES, expert_names
from mpjax.errors import CheckpointError

_NEITHER = ("attn_k", "attn_v", "attn_q_norm", "attn_k_norm")
LATENT_NAMES: Mapping[str, str] = {
    **{key: name for key, name in NAMES.items() if key not in _NEITHER},
    **expert_names(),
    **{"attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm"},
    **{"attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"},
    **{"attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj"},
}
JOINT = "self_attn.kv_b_proj.weight"
_KEYS = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")


def halves(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The maps from latents to keys and to values, by their layer, such as `blk.3`."""
    found = {}
    for name, keys in tensors.items():
        if (match := _KEYS.fullmatch(name)) is None:
            continue
        values = tensors.get(f"{match[1]}.attn_v_b.weight")
        if values is not None and len(keys.shape) == len(values.shape) == 3:
            found[match[1]] = keys, values
    return found


def joint_shape(keys: Tensor, values: Tensor) -> tuple[int, int]:
    """The shape of Hugging Face's `kv_b_proj`, from those of its halves."""
    heads, rank, channels = keys.shape
    return heads * (channels + values.shape[1]), rank


def join(arrays: Sequence[np.ndarray], kinds: Sequence[TensorType]) -> np.ndarray:
    """Hugging Face's `kv_b_proj`, float32 [heads · (key and value channels), latent].

    arrays: the halves, as numbers or as blocks of these types. Raises CheckpointError if their
    heads or latents differ.
    """
    keys, values = (
        np.asarray(_values(array, kind), np.float32)
        for array, kind in zip(arrays, kinds, strict=True)
    )
    if (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise CheckpointError(
            f"attn_k_b is {[*keys.shape]} and attn_v_b is {[*values.shape]}: expected [heads, "
            "latent, key channels] and [heads, value channels, latent]"
        )
    both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return np.ascontiguousarray(both.reshape(-1, keys.shape[1]))


def _values(array: np.ndarray, kind: TensorType) -> np.ndarray:
    if kind.dtype is not None:
        return array
    heads, rows, *blocks = array.shape
    found = dequantized([array.reshape(heads * rows, *blocks)], kind)
    return found.reshape(heads, rows, -1)


def dequantized(arrays: Sequence[np.ndarray], kind: TensorType) -> np.ndarray:
    """The numbers of one matrix of blocks, float32."""
    [blocks] = arrays
    return np.asarray(jax.jit(kind.dequantize)(jnp.asarray(blocks)))


def deepseek_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of DeepSeek-V2 (softmax scores) or V3 (sigmoid scores).

    A router with selection biases has sigmoid scores if the file doesn't say.
    """
    name = metadata.text("general.architecture")
    has_correction = any(key.endswith(CORRECTION) for key in tensors)
    scores = metadata.whole(f"{name}.expert_gating_func", 0)
    found = sizes(metadata, tensors) | grouped_keys(metadata, tensors)
    if (scores or (SIGMOID if has_correction else SOFTMAX)) == SIGMOID:
        return found | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    require_scores(metadata, SOFTMAX, SOFTMAX)
    if found.pop("norm_topk_prob"):
        raise CheckpointError(
            f"{metadata.path}: {name}.expert_weights_norm is true with softmax scores: expected "
            "false, as in DeepSeek-V2"
        )
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    kind = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    return found | kind | {"topk_method": method}


def mistral_keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of the config.json of Mistral Small 4."""
    require_scores(metadata, SOFTMAX, SOFTMAX)
    return sizes(metadata, tensors) | grouped_keys(metadata, tensors)


def sizes(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The sizes of heads and latents.

    Files with halves have 1 in head_count_kv, and 0 for layers of another kind.
    """
    name = metadata.text("general.architecture")
    own = {key: metadata.whole(f"{name}.attention.{key}") for key in ("key_length", "value_length")}
    keys, values = (metadata.whole(f"{name}.attention.{key}_mla", own[key]) for key in own)
    rotated = metadata.whole(f"{name}.rope.dimension_count")
    heads = metadata.whole(f"{name}.attention.head_count")
    key, count = f"{name}.attention.head_count_kv", metadata.whole(f"{name}.block_count")
    if (cached := {*metadata.each(key, count, heads)} - {0}) - {1, heads}:
        raise CheckpointError(f"{metadata.path}: {key} is {cached}: expected 1 or {heads}")
    return {
        "num_key_value_heads": heads,
        "head_dim": None,
        "kv_lora_rank": metadata.whole(f"{name}.attention.kv_lora_rank"),
        "q_lora_rank": metadata.whole(f"{name}.attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
    }

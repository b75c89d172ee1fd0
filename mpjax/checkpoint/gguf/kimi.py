"""Kimi Linear in GGUF files: Kimi Delta Attention, and latent attention in layers with KV heads.

Source: llama.cpp, gguf-py/gguf/constants.py and conversion/kimi_linear.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint.gguf import names
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.latent import LATENT_NAMES, sizes
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.mixtures import SIGMOID, correction, grouped_keys, require_scores

_MIXER, _SHARED = "self_attn", "block_sparse_moe.shared_experts"
NAMES: Mapping[str, str] = {
    **LATENT_NAMES,
    **{key: name for key, name in names.NAMES.items() if key in ("attn_k", "attn_v")},
    **names.expert_names("block_sparse_moe", ("w1", "w3", "w2")),
    **{f"ffn_{half}_shexp": f"{_SHARED}.{half}_proj" for half in ("gate", "up", "down")},
    **{f"ssm_{which}_{half}": f"{_MIXER}.{which}_{half}_proj" for which in "fg" for half in "ab"},
    **{f"ssm_conv1d_{which}": f"{_MIXER}.{which}_conv1d" for which in "qkv"},
    **{"ssm_beta": f"{_MIXER}.b_proj", "ssm_norm": f"{_MIXER}.o_norm"},
}
# GGUF's tensor name → Hugging Face's, for tensors without `.weight`.
ARRAYS: Mapping[str, str] = {
    **{"ssm_a": f"{_MIXER}.A_log", "ssm_dt.bias": f"{_MIXER}.dt_bias"},
    **correction("block_sparse_moe.gate.e_score_correction_bias"),
}


def keys(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Kimi Linear's config.json. Its linear layers have as many heads as the others."""
    name = "kimi-linear"
    require_scores(metadata, SIGMOID, SIGMOID)
    found = sizes(metadata, tensors) | grouped_keys(metadata, tensors)
    count = metadata.whole(f"{name}.block_count")
    heads = metadata.each(f"{name}.attention.head_count_kv", count)
    del found["attention_bias"]
    return found | {
        "layer_types": [("linear" if each == 0 else "full") + "_attention" for each in heads],
        "linear_num_heads": metadata.whole(f"{name}.attention.head_count"),
        "linear_head_dim": metadata.whole(f"{name}.kda.head_dim"),
        "linear_conv_kernel_dim": metadata.whole(f"{name}.ssm.conv_kernel"),
        "norm_topk_prob": metadata.flag(f"{name}.expert_weights_norm", True),
    }

"""Gemma 3n and Gemma 4 in GGUF files, whose layers have sizes of their own.

Source: llama.cpp, gguf-py/gguf/constants.py and conversion/gemma.py. Files list the layers with a
window and, where layers differ, their KV heads and MLP sizes. In layers without a tensor of values,
the keys are the values.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.names import GEMMA_NAMES, TABLES
from mpjax.errors import CheckpointError
from mpjax.models.config_json import KINDS

MOST_STREAMS = 16
LAUREL = "blk.0.laurel_l.weight"
PER_LAYER_TABLES: Mapping[str, str] = {
    **TABLES,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    **{
        f"altup_{short}.{number}": f"model.altup_{name}.{number}"
        for short, name in {"proj": "projections", "unembd_proj": "unembed_projections"}.items()
        for number in range(MOST_STREAMS)
    },
}
_PER_LAYER = {
    **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection"},
    "post_norm": "post_per_layer_input_norm",
}
GEMMA_3N_NAMES: Mapping[str, str] = {
    **{**GEMMA_NAMES, **_PER_LAYER},
    **{"altup_correct_coef": "altup.correction_coefs", "altup_router": "altup.modality_router"},
    **{"altup_predict_coef": "altup.prediction_coefs", "altup_router_norm": "altup.router_norm"},
    **{"laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right"},
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA_4_NAMES: Mapping[str, str] = {
    **{**GEMMA_NAMES, **_PER_LAYER, "ffn_gate_inp": "router.proj"},
    **{f"ffn_{half}_exps": f"experts.{{expert}}.{half}_proj" for half in ("gate", "up", "down")},
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{each}": f"post_feedforward_layernorm_{each}" for each in (1, 2)},
}
# GGUF's tensor name → Hugging Face's, for tensors without `.weight`.
GEMMA_3N_ARRAYS: Mapping[str, str] = {"altup_correct_scale.weight": "altup.correct_output_scale"}
GEMMA_4_ARRAYS: Mapping[str, str] = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}


def gemma3n(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Gemma 3n's config.json."""
    name, count = "gemma3n", metadata.whole("gemma3n.block_count")
    quantiles = metadata.numbers(f"{name}.activation_sparsity_scale", length=count)
    shares = [statistics.NormalDist().cdf(float(each)) for each in quantiles]
    inner, left = metadata.each(f"{name}.feed_forward_length", count), tensors.get(LAUREL)
    return _common(metadata, tensors) | {
        "activation_sparsity_pattern": shares,
        "intermediate_size": inner if len(inner) > 1 else inner[0],
        "altup_active_idx": metadata.whole(f"{name}.altup.active_idx"),
        "altup_num_inputs": metadata.whole(f"{name}.altup.num_inputs"),
        **({"laurel_rank": left.shape[0]} if left is not None and left.shape else {}),
        "rope_local_base_freq": metadata.number(f"{name}.rope.freq_base_swa", 10000.0),
    }


def gemma4(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys of Gemma 4's config.json. Raises CheckpointError for layers that no Gemma 4 has."""
    name, count = "gemma4", metadata.whole("gemma4.block_count")
    found = _common(metadata, tensors)
    kinds, shared = found["layer_types"], found["num_kv_shared_layers"]
    heads = metadata.each(f"{name}.attention.head_count_kv", count)
    by_kind = {kind: {*heads} if len(heads) == 1 else set[int]() for kind in kinds}
    for kind, each in zip(kinds, heads, strict=False):
        by_kind[kind].add(each)
    inner = metadata.each(f"{name}.feed_forward_length", count)
    doubled = [inner[0]] * (count - shared) + [2 * inner[0]] * shared
    for key, is_known, expected in (
        ("attention.head_count_kv", all(len(own) == 1 for own in by_kind.values()), "one number"),
        ("feed_forward_length", len({*inner}) == 1 or inner == doubled, "one number, or twice it"),
    ):
        if not is_known:
            raise CheckpointError(
                f"{metadata.path}: {name}.{key} differs between layers of one kind: expected "
                f"{expected} for the layers that attend to all tokens, and for the others"
            )
    first = [min(by_kind[kind]) for kind in KINDS if kind in by_kind]
    own = (i for i, kind in enumerate(kinds) if kind == KINDS[0] and i < count - shared)
    experts = metadata.whole(f"{name}.expert_count", 0)
    found |= {
        **_heads(metadata),
        "num_key_value_heads": first[-1],
        "num_global_key_value_heads": first[0],
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in own),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": len({*inner}) > 1,
        "enable_moe_block": experts > 0,
    }
    if experts:
        found |= {
            "num_experts": experts,
            "top_k_experts": metadata.whole(f"{name}.expert_used_count"),
            "moe_intermediate_size": metadata.whole(f"{name}.expert_feed_forward_length"),
        }
    return found


def _common(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys that both have."""
    name = metadata.text("general.architecture")
    count = metadata.whole(f"{name}.block_count")
    flags = metadata.numbers(f"{name}.attention.sliding_window_pattern", length=count)
    cap = metadata.number(f"{name}.final_logit_softcapping", 0.0)
    size = metadata.whole(f"{name}.embedding_length_per_layer_input", 0)
    table = tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": [KINDS[bool(flag)] for flag in flags],
        "sliding_window": metadata.whole(f"{name}.attention.sliding_window", 0) or None,
        "num_kv_shared_layers": metadata.whole(f"{name}.attention.shared_kv_layers", 0),
        "final_logit_softcapping": cap or None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "hidden_size_per_layer_input": size,
        **({"vocab_size_per_layer_input": table.shape[0]} if table and table.shape else {}),
    }


def _heads(metadata: Metadata) -> dict[str, int]:
    """The channels of heads with and without a window. Raises CheckpointError for other values."""
    whole = metadata.whole("gemma4.attention.key_length")
    local = metadata.whole("gemma4.attention.key_length_swa", whole)
    for size, end in ((whole, ""), (local, "_swa")):
        for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            if (found := metadata.whole(f"gemma4.{key}", size)) != size:
                raise CheckpointError(
                    f"{metadata.path}: gemma4.{key} is {found}: expected {size}, as in "
                    f"gemma4.attention.key_length{end}"
                )
    return {"global_head_dim": whole, "head_dim": local}

"""Names of modules in GGUF's and in Hugging Face's files.

Source: llama.cpp, gguf-py/gguf/constants.py and gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# GGUF's module name, without `blk.<layer>.` → Hugging Face's.
TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NAMES = {**NAMES, **POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
WITHOUT_PRE_NORMS = {"attn_norm", "ffn_norm"}
OLMO_NAMES = {k: v for k, v in {**NAMES, **POST_NORMS}.items() if k not in WITHOUT_PRE_NORMS}
PHI_NAMES = {
    **{k: v for k, v in NAMES.items() if k not in ("attn_q", "attn_k", "attn_v", "ffn_gate")},
    **{"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Seed-OSS names the norm before the MLP `post_attention_norm`.
SEED_NAMES = {
    **{key: name for key, name in NAMES.items() if key != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}
HUNYUAN_NAMES = {
    **NAMES,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
GLM_NAMES = {
    **{key: name for key, name in NAMES.items() if key != "ffn_gate"},
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
COHERE_NAMES = {key: name for key, name in NAMES.items() if key != "ffn_norm"}
STARCODER_NAMES = {
    **{key: name for key, name in NAMES.items() if key != "ffn_gate"},
    **{"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
APERTUS_NAMES = {
    **{key: name for key, name in NAMES.items() if key != "ffn_gate"},
    **{"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
}


def expert_names(
    block: str = "mlp",
    maps: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    shared: str = "shared_experts",
) -> dict[str, str]:
    """GGUF's name → Hugging Face's, of the modules of an MoE layer.

    maps: names of an expert's gate, up and down maps. router, shared: names of the router and of
    the shared expert in the block.
    """
    halves = dict(zip(("gate", "up", "down"), maps, strict=True))
    return {
        "ffn_gate_inp": f"{block}.{router}",
        **{f"ffn_{w}_exps": f"{block}.experts.{{expert}}.{name}" for w, name in halves.items()},
        **{f"ffn_{w}_shexp": f"{block}.{shared}.{name}" for w, name in halves.items()},
    }


QWEN_EXPERTS: Mapping[str, str] = {
    **expert_names(shared="shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL_EXPERTS: Mapping[str, str] = expert_names("block_sparse_moe", ("w1", "w3", "w2"))
GPT_OSS_EXPERTS: Mapping[str, str] = {
    **expert_names(maps=("gate_up_proj", "gate_up_proj", "down_proj"), router="router"),
    "post_attention_norm": "post_attention_layernorm",
}
LLAMA4_EXPERTS: Mapping[str, str] = {
    **expert_names("feed_forward", router="router", shared="shared_expert"),
    **{f"ffn_{half}": f"feed_forward.{half}_proj" for half in ("gate", "up", "down")},
    **{f"ffn_{half}_exps": "feed_forward.experts.{expert}.gate_up_proj" for half in ("gate", "up")},
}
HUNYUAN_EXPERTS: Mapping[str, str] = expert_names(router="gate.wg", shared="shared_mlp")

"""Families of test_config_sweep.py with latents, and the values of their keys."""

from __future__ import annotations

from typing import Any

ORIGINAL = "original_max_position_embeddings"
LATENT = {
    **{"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16},
    **{"q_lora_rank": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4},
    **{"moe_intermediate_size": 48, "topk_group": 2, "num_key_value_heads": 4, "head_dim": 8},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, ORIGINAL: 16}
GROWING = YARN | {"llama_4_scaling_beta": 0.5}
# As MODELS, VALUES, OWN and READ in test_config_sweep.py.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2": (
        "DeepseekV2ForCausalLM",
        {**LATENT, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1}
        | {"topk_group": 1},
    ),
    "DeepseekV3": ("DeepseekV3ForCausalLM", {**LATENT, "first_k_dense_replace": 1}),
    "DeepseekV32": (
        "DeepseekV32ForCausalLM",
        {**LATENT, "first_k_dense_replace": 1, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "Glm4MoeLite": ("Glm4MoeLiteForCausalLM", LATENT),
    "Mistral4": (
        "Mistral4ForCausalLM",
        {**LATENT, "rope_parameters": GROWING, "first_k_dense_replace": 1, "head_dim": 20},
    ),
}
VALUES: dict[str, list[Any]] = {
    **{"kv_lora_rank": [32], "q_lora_rank": [24], "qk_rope_head_dim": [], "v_head_dim": [12]},
    **{"qk_nope_head_dim": [16], "rope_interleave": [False], "topk_method": ["greedy"]},
    **{"mlp_layer_types": [["sparse", "dense"]]},
}
IRRELEVANT: dict[str, Any] = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}
SCALED = [
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    YARN,
    {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 0.9},
    {"rope_type": "default", "rope_theta": 100.0},
]
OWN: dict[tuple[str, str], list[Any]] = {
    ("DeepseekV2", "norm_topk_prob"): [True],
    ("DeepseekV2", "num_experts_per_tok"): [1],  # as many as one group has, at most
    ("DeepseekV2", "q_lora_rank"): [None, 24],
    ("DeepseekV3", "q_lora_rank"): [None, 24],
    ("DeepseekV3", "rope_parameters"): SCALED,
    ("DeepseekV32", "layer_types"): [],
    ("Mistral4", "rope_parameters"): [
        GROWING | {"mscale": 1.0, "mscale_all_dim": 1.0},
        GROWING | {"llama_4_scaling_beta": 1.5, ORIGINAL: 4},
    ],
    **{("Mistral4", key): [] for key in ("rope_scaling", "rope_theta")},
    **{(name, "n_group"): [2] for name in MODELS},
    **{(name, "topk_group"): [2 if name == "DeepseekV2" else 1] for name in MODELS},
    ("Mistral4", "qk_nope_head_dim"): [],  # on which the size of heads depends
}
OTHER_SIZES = {
    name: {"num_key_value_heads": 8, "head_dim": 20 if name == "Mistral4" else 8} for name in MODELS
}
READ: dict[str, tuple[str, ...]] = {}
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "DeepseekV3": [{"rope_parameters": YARN | {"mscale_all_dim": 1.0}, "rope_interleave": False}]
}
REFUSED = ("mlp_bias", "norm_topk_prob")

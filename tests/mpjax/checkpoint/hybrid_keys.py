"""Families of test_config_sweep.py whose mixers keep a state, and the values of their keys."""

from __future__ import annotations

from typing import Any

DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "full_attention_interval": 2},
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "shared_expert_intermediate_size": 32,
}
QUARTER = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 100.0}
OF_GATES = ("attn_output_gate", "output_gate_type", "mamba_ssm_dtype")
# As MODELS, VALUES, IRRELEVANT, TOGETHER and OWN in test_config_sweep.py.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GraniteMoeHybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **{"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
            **{"num_local_experts": 4, "mamba_n_heads": 4, "mamba_d_state": 8},
            **{"shared_intermediate_size": 32, "position_embedding_type": "rope"},
            "attention_multiplier": 0.2,
        },
    ),
    "FalconH1": (
        "FalconH1ForCausalLM",
        {
            **{"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_rms_norm": True},
            "head_dim": 8,
        },
    ),
    "NemotronH": (
        "NemotronHForCausalLM",
        {
            **{"layers_block_type": ["linear_attention", "moe", "attention", "mlp"]},
            **{"mamba_num_heads": 4, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8},
            **{"n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2},
            **{"moe_shared_expert_intermediate_size": 48, "time_step_min": 0.3},
        },
    ),
    "Lfm2": ("Lfm2ForCausalLM", {"full_attn_idxs": [1], "block_multiple_of": 8}),
    "Lfm2Moe": (
        "Lfm2MoeForCausalLM",
        {
            **{"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
            **{"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2},
            "moe_intermediate_size": 48,
        },
    ),
    "OlmoHybrid": (
        "OlmoHybridForCausalLM",
        {**DELTA, "rms_norm_eps": 1e-3},
    ),
    "KimiLinear": (
        "KimiLinearForCausalLM",
        {
            **{"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 3},
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "linear_head_dim": 8},
            **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
            **{"v_head_dim": 12, "num_local_experts": 8, "n_group": 2, "topk_group": 1},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 48, "rms_norm_eps": 1e-3},
        },
    ),
    "Qwen3Next": ("Qwen3NextForCausalLM", {**EXPERTS, **DELTA, "mlp_only_layers": [1]}),
    "Qwen3_5Text": ("Qwen3_5ForCausalLM", DELTA),
    "Qwen3_5MoeText": ("Qwen3_5MoeForCausalLM", {**EXPERTS, **DELTA}),
}
VALUES: dict[str, list[Any]] = {
    **{"norm_eps": [0.1], "conv_bias": [True], "conv_L_cache": [1, 5]},
    **{"full_attn_idxs": [[0, 1]], "block_multiple_of": [20], "tie_embedding": [False]},
    **{
        "block_ffn_dim_multiplier": [1.5],
        "block_auto_adjust_ff_dim": [False],
        "block_ff_dim": [80],
    },
    **{"num_dense_layers": [0, 3], "use_expert_bias": [False], "routed_scaling_factor": [2.5]},
    **{"mamba_d_ssm": [96], "mamba_rms_norm": [False], "mamba_norm_before_gate": [False]},
    **{"projectors_bias": [True], "lm_head_multiplier": [2.0], "key_multiplier": [3.0]},
    **{"mlp_multipliers": [[2.0, 0.5]], "ssm_multipliers": [[0.5, 2.0, 1.5, 3.0, 0.7]]},
    **{"attention_in_multiplier": [2.0], "attention_out_multiplier": [2.0]},
    **{"ssm_in_multiplier": [2.0], "ssm_out_multiplier": [2.0]},
    **{"layers_block_type": [["mlp", "full_attention", "mamba"]], "mlp_hidden_act": ["silu"]},
    **{"ssm_state_size": [4], "mamba_num_heads": [8]},
    **{"mamba_head_dim": [8], "mamba_hidden_act": ["gelu"], "n_groups": [4], "conv_kernel": [3]},
    **{"time_step_min": [0.1], "use_conv_bias": [False], "use_bias": [True]},
    **{"moe_shared_expert_intermediate_size": [32], "moe_latent_size": [16]},
    **{
        "layer_norm_epsilon": [0.1],
        "mamba_n_heads": [8],
        "mamba_n_groups": [2],
        "mamba_d_state": [4],
        "mamba_d_conv": [2],
    },
    **{"mamba_d_head": ["auto"], "mamba_expand": [1], "mamba_conv_bias": [False]},
    **{"mamba_proj_bias": [True], "time_step_limit": [[0.5, 1.0]]},
    **{"shared_intermediate_size": [48], "position_embedding_type": [None]},
    **{"linear_num_key_heads": [4], "linear_num_value_heads": [2, 6], "linear_key_head_dim": [4]},
    **{"linear_value_head_dim": [16], "linear_conv_kernel_dim": [2, 7]},
    **{"full_attention_interval": [1], "attn_output_gate": [False]},
    **{"output_gate_type": ["sigmoid"], "mamba_ssm_dtype": ["bfloat16"]},
    "linear_allow_neg_eigval": [False],
    **{"linear_num_heads": [2], "linear_head_dim": [4]},
}
IRRELEVANT: dict[str, Any] = {
    **{"mamba_chunk_size": 128, "num_logits_to_keep": 3, "use_mamba_kernels": False},
    **{"chunk_size": 64, "expand": 4, "time_step_max": 0.5, "time_step_floor": 0.01},
    **{"hidden_dropout": 0.5, "residual_in_fp32": True, "rescale_prenorm_residual": False},
    **{"moe_shared_expert_overlap": False, "mamba_ssm_cache_dtype": "bfloat16"},
    **{"num_nextn_predict_layers": 0, "mtp_layers_block_type": ["moe"]},
    **{"linear_a_log_min": 0.5, "linear_a_log_max": 4.0, "linear_dt_min": 0.01},
    **{"linear_dt_max": 0.2, "linear_dt_init_floor": 1e-3},
}
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "FalconH1": [{"mamba_d_ssm": None, "mamba_expand": 1}],
    "KimiLinear": [
        {
            "linear_attn_config": {
                **{"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 3},
                **{"full_attn_layers": [1], "kda_layers": [2]},
            },
            "layer_types": None,
        }
    ],
    "NemotronH": [{"layers_block_type": None, "hybrid_override_pattern": "-M*"}],
}
OWN: dict[tuple[str, str], list[Any]] = {
    ("GraniteMoeHybrid", "layer_types"): [["attention", "mamba", "linear_attention"]],
    # Which transformers does not read.
    ("NemotronH", "n_shared_experts"): [],
    ("NemotronH", "tie_word_embeddings"): [],
    ("NemotronH", "mamba_proj_bias"): [],
    ("NemotronH", "rope_scaling"): [],
    ("NemotronH", "rope_theta"): [],
    ("FalconH1", "mamba_expand"): [],  # beside mamba_d_ssm
    ("NemotronH", "time_step_limit"): [],
    ("NemotronH", "sliding_window"): [],
    ("NemotronH", "attention_bias"): [],
    ("NemotronH", "n_group"): [2],
    ("NemotronH", "topk_group"): [3],
    ("Lfm2", "layer_types"): [["full_attention", "conv"]],
    ("Lfm2Moe", "layer_types"): [["full_attention", "conv", "conv"]],
    ("Lfm2Moe", "norm_topk_prob"): [False],
}
for _name in ("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText"):
    OWN[_name, "layer_types"] = [["full_attention", "linear_attention"]]
    OWN[_name, "partial_rotary_factor"] = [0.5]
    OWN[_name, "rope_parameters"] = [{"rope_type": "linear", "factor": 2.0}, QUARTER]
OWN["OlmoHybrid", "layer_types"] = [["full_attention", "linear_attention"]]
OWN["OlmoHybrid", "rope_parameters"] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "default", "rope_theta": None},
]
OWN |= {
    ("KimiLinear", "layer_types"): [["full_attention", "linear_attention"]],
    ("KimiLinear", "tie_word_embeddings"): [],  # which transformers does not follow
    ("KimiLinear", "q_lora_rank"): [24],
    ("KimiLinear", "v_head_dim"): [16],
    ("KimiLinear", "qk_nope_head_dim"): [12],
    ("KimiLinear", "topk_group"): [2],
    **{("KimiLinear", key): [] for key in ("rope_scaling", "rope_theta")},
}
_OF_DELTA = ("full_attention_interval", "partial_rotary_factor", *OF_GATES)
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "KimiLinear": {
        "num_key_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
}
# Keys that are not fields of the classes, which they read all the same.
READ: dict[str, tuple[str, ...]] = {
    **{"Lfm2": ("tie_embedding", "block_ff_dim"), "Lfm2Moe": ("tie_embedding",)},
    **dict.fromkeys(("Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText"), _OF_DELTA),
}
# Keys of Nemotron-H of which one value is supported.
REFUSED = ("mlp_hidden_act", "mamba_hidden_act", "moe_latent_size", "mlp_bias")

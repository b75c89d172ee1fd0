"""Gemma 3n and 4 in test_config_sweep.py, with all that they have, and the values of their keys."""

from __future__ import annotations

from typing import Any

FOUR = ["sliding_attention", "full_attention"] * 2
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
WIDE = {"head_dim": 24, "num_key_value_heads": 1}
# As MODELS, VALUES, OWN and READ in test_config_sweep.py.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma4Text": (
        "Gemma4ForCausalLM",
        {
            **{"num_hidden_layers": 4, "layer_types": FOUR, "num_kv_shared_layers": 2},
            **{"sliding_window": 8, "global_head_dim": 32, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4},
            **{"top_k_experts": 2, "moe_intermediate_size": 24, "hidden_size_per_layer_input": 8},
            "vocab_size_per_layer_input": 64,
        },
    ),
    "Gemma3nText": (
        "Gemma3nForCausalLM",
        {
            **{"num_hidden_layers": 4, "layer_types": FOUR, "num_kv_shared_layers": 2},
            **{"sliding_window": 8, "hidden_size_per_layer_input": 8, "laurel_rank": 12},
            **{
                "vocab_size_per_layer_input": 64,
                "activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0],
            },
        },
    ),
}
VALUES: dict[str, list[Any]] = {
    **{"attention_k_eq_v": [False], "enable_moe_block": [False], "use_double_wide_mlp": [True]},
    **{"num_kv_shared_layers": [0, 1], "top_k_experts": [3], "global_head_dim": [16]},
    **{"num_global_key_value_heads": [2, None], "hidden_size_per_layer_input": [16]},
    "vocab_size_per_layer_input": [32],  # more rows change nothing
    **{"altup_active_idx": [2], "altup_num_inputs": [2], "altup_correct_scale": [False]},
    **{"laurel_rank": [24], "activation_sparsity_pattern": [[0.1] * 4, None]},
}
OWN: dict[tuple[str, str], list[Any]] = {
    ("Gemma4Text", "layer_types"): [[*FOUR[:2], "full_attention", "sliding_attention"]],
    ("Gemma4Text", "use_bidirectional_attention"): ["all"],
    ("Gemma4Text", "rope_parameters"): [
        {"full_attention": PROPORTIONAL, "sliding_attention": PLAIN},
        {"full_attention": PROPORTIONAL | {"factor": 2.0}, "sliding_attention": PLAIN},
        {
            "full_attention": PLAIN,
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
    ],
    ("Gemma3nText", "layer_types"): [[*FOUR[:2], "full_attention", "sliding_attention"]],
    ("Gemma3nText", "final_logit_softcapping"): [0.5],
    ("Gemma3nText", "intermediate_size"): [[64, 48, 96, 80]],
    ("Gemma3nText", "rope_parameters"): [
        {"full_attention": PLAIN | {"rope_theta": 100.0}, "sliding_attention": PLAIN},
        {
            "full_attention": PLAIN,
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
        },
    ],
    ("Gemma3nText", "rope_scaling"): [{"rope_type": "linear", "factor": 2.0}],
    # transformers reads neither.
    **{("Gemma4Text", key): [] for key in ("rope_scaling", "rope_theta")},
}
OTHER_SIZES = {
    "Gemma4Text": {
        **{"num_hidden_layers": 6, "layer_types": [*FOUR, *FOUR[:2]], "global_head_dim": 16},
        "vocab_size_per_layer_input": 80,
    },
    "Gemma3nText": {
        **{"num_hidden_layers": 6, "layer_types": [*FOUR, *FOUR[:2]]},
        **{"activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0, 0.0, 0.3]},
    },
}
READ = {"Gemma4Text": ("global_head_dim", "num_global_key_value_heads")}
READ["Gemma3nText"] = ("rope_local_base_freq",)
IRRELEVANT: dict[str, Any] = {"altup_coef_clip": 0.1}
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "Gemma4Text": [
        {"per_layer_config": {"1": WIDE, "3": WIDE}, "num_global_key_value_heads": 2},
        {"use_bidirectional_attention": "vision", "sliding_window": 4},
    ]
}
REFUSED = ("vocab_size_per_layer_input",)

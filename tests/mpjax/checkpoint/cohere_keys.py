"""Cohere's mixture in test_config_sweep.py, and the values of its keys."""

from __future__ import annotations

from typing import Any

# As MODELS, VALUES, OWN and READ in test_config_sweep.py.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Cohere2Moe": (
        "Cohere2MoeForCausalLM",
        {
            **{"sliding_window": 8, "sliding_window_pattern": 2, "num_hidden_layers": 3},
            **{"num_experts": 4, "num_shared_experts": 1, "prefix_dense_intermediate_size": 56},
            "first_k_dense_replace": 1,
        },
    ),
}
VALUES: dict[str, list[Any]] = {
    **{"num_shared_experts": [0, 2], "shared_expert_combination_strategy": ["sum"]},
    **{"expert_selection_fn": ["sigmoid"], "prefix_dense_sliding_window_pattern": [2]},
    "prefix_dense_intermediate_size": [64],
}
OWN: dict[tuple[str, str], list[Any]] = {
    ("Cohere2Moe", "layer_types"): [["full_attention", "full_attention", "sliding_attention"]],
    ("Cohere2Moe", "mlp_layer_types"): [["dense", "sparse", "dense"]],
    ("Cohere2Moe", "norm_topk_prob"): [],  # which counts with the sigmoid
}
OTHER_SIZES: dict[str, dict[str, Any]] = {}
READ = {"Cohere2Moe": ("first_k_dense_replace",)}
IRRELEVANT: dict[str, Any] = {}
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "Cohere2Moe": [{"expert_selection_fn": "sigmoid", "norm_topk_prob": False}]
}

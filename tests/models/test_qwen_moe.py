from __future__ import annotations

import dataclasses

import pytest

from mpjax.models import (
    ConfigError,
    ExpertsSpec,
    GatedMLPSpec,
    GroupedQuerySpec,
    LayerSpec,
    Qwen2MoE,
    Qwen3MoE,
)
from mpjax.models.presets import FILES

QWEN3 = FILES["qwen3-30b-a3b"]
# Qwen1.5-MoE-A2.7B.
QWEN2 = QWEN3 | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "head_dim": None,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
}
EXPERTS = ExpertsSpec(768, num_experts=128, experts_per_token=8)


def test_qwen3():
    config = Qwen3MoE.config_from_hf(QWEN3)
    assert config.layers == (LayerSpec(GroupedQuerySpec(qk_norm=True), EXPERTS),) * 48
    newer = {key: value for key, value in QWEN3.items() if key != "num_experts"}
    newer |= {"num_local_experts": 128, "norm_topk_prob": None}
    layer = Qwen3MoE.config_from_hf(newer).layers[0]
    assert layer.mlp == dataclasses.replace(EXPERTS, renormalize=False)
    windowed = QWEN3 | {"use_sliding_window": True, "sliding_window": 64}
    assert Qwen3MoE.config_from_hf(windowed).windows == (64,) * 48


def test_qwen2_has_a_shared_expert():
    config = Qwen2MoE.config_from_hf(QWEN2)
    experts = ExpertsSpec(
        1408,
        num_experts=60,
        experts_per_token=4,
        renormalize=False,
        shared_size=5632,
        shared_gate=True,
    )
    assert config.layers == (LayerSpec(GroupedQuerySpec(qkv_bias=True), experts),) * 24
    arrays = {place.path: place.name for place in Qwen2MoE.array_places(config)}
    mlp = "model.layers.1.mlp"
    assert arrays["layers.1.mlp.router"] == f"{mlp}.gate.weight"
    assert arrays["layers.1.mlp.shared_gate"] == f"{mlp}.shared_expert_gate.weight"
    names = {place.path: place.names for place in Qwen2MoE.linear_places(config)}
    assert names["layers.1.mlp.shared.gate_up"][0] == f"{mlp}.shared_expert.gate_proj"
    assert names["layers.1.mlp.experts.down"][2] == f"{mlp}.experts.2.down_proj"
    unbiased = Qwen2MoE.config_from_hf(QWEN2 | {"qkv_bias": False}).layers[0].attention
    assert unbiased == GroupedQuerySpec()


def test_qwen2_has_windows_in_every_other_layer():
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert Qwen2MoE.config_from_hf(QWEN2 | changes).windows[:6] == (64, None, 64, None, None, None)
    kinds = ["full_attention"] * 23 + ["sliding_attention"]
    listed = Qwen2MoE.config_from_hf(QWEN2 | changes | {"layer_types": kinds})
    assert listed.windows == (None,) * 23 + (64,)


def test_some_layers_have_a_gated_mlp():
    config = Qwen3MoE.config_from_hf(QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    mlps = [layer.mlp for layer in config.layers[:6]]
    assert mlps == [GatedMLPSpec(6144), EXPERTS, *[GatedMLPSpec(6144)] * 3, EXPERTS]
    with pytest.raises(ConfigError, match=r"mlp_only_layers is \[48\]: expected a list of layers"):
        Qwen3MoE.config_from_hf(QWEN3 | {"mlp_only_layers": [48]})

"""GLM-4-0414, and the mixtures GLM-4.5 to 4.7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, grouped_experts, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names, expert_names

_LAYER = "model.layers.{layer}."
_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
}


class Glm4(Decoder):
    """GLM-4: pre- and post-norms; interleaved RoPE on half of each head."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention_post_norm.weight": f"{_LAYER}post_self_attn_layernorm.weight",
        "mlp_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "mlp_post_norm.weight": f"{_LAYER}post_mlp_layernorm.weight",
        "mlp.gate_up": f"{_LAYER}mlp.gate_up_proj",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Glm4ForCausalLM` config.json."""
        attention = GroupedQuerySpec(None, flag(hf, "attention_bias"), interleaved=True)
        layer = LayerSpec(attention, GatedMLPSpec(integer(hf, "intermediate_size")), "both")
        fields = common_fields(hf, partial_rotary=True)
        return DecoderConfig(**fields, layers=(layer,) * layer_count(hf))


class Glm4MoE(Decoder):
    """GLM-4.5: partial RoPE (half of each head); group-limited sigmoid router, selection bias."""

    names: ClassVar[Names] = {**NAMES, **expert_names()}
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    has_spare_layers: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "moe_intermediate_size": 1408,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Glm4MoeForCausalLM` config.json."""
        bias, dense = flag(hf, "attention_bias"), integer(hf, "first_k_dense_replace", minimum=0)
        attention = GroupedQuerySpec(None, bias, qk_norm=flag(hf, "use_qk_norm"))
        mlps = GatedMLPSpec(integer(hf, "intermediate_size")), ExpertsSpec(**grouped_experts(hf))
        layers = tuple(
            LayerSpec(attention, mlps[number >= dense]) for number in range(layer_count(hf))
        )
        return DecoderConfig(**common_fields(hf, partial_rotary=True), layers=layers)

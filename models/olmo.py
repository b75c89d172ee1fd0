"""OLMo 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

_LAYER = "model.layers.{layer}."


class Olmo2(Decoder):
    """OLMo 2: norms after each half instead of before, and of the queries and keys of all heads."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
    }

    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Olmo2ForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        attention = GroupedQuerySpec(None, bias, bias, qk_norm=True, joint_norm=True)
        layer = LayerSpec(attention, GatedMLPSpec(integer(hf, "intermediate_size")), "post")
        return DecoderConfig(**common_fields(hf), layers=(layer,) * layer_count(hf))

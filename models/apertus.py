"""Apertus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import UngatedMLPSpec
from mpjax.models.parameters import NAMES, Names

_LAYER = "model.layers.{layer}."
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Apertus(Decoder):
    """Apertus: QK-norm, and an MLP without a gate whose activation is xIELU."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention_norm.weight": f"{_LAYER}attention_layernorm.weight",
        "mlp_norm.weight": f"{_LAYER}feedforward_layernorm.weight",
        "mlp.up": f"{_LAYER}mlp.up_proj",
        "mlp.alpha_p": f"{_LAYER}mlp.act_fn.alpha_p",
        "mlp.alpha_n": f"{_LAYER}mlp.act_fn.alpha_n",
    }
    spare: ClassVar[tuple[str, ...]] = ("act_fn.beta", "act_fn.eps")
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": ROPE,
        "eos_token_id": 2,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `ApertusForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        mlp = UngatedMLPSpec(integer(hf, "intermediate_size"), activation="xielu")
        layer = LayerSpec(GroupedQuerySpec(None, bias, bias, qk_norm=True), mlp)
        fields = common_fields(hf, activation="xielu", theta=12e6)
        return DecoderConfig(**fields, layers=(layer,) * layer_count(hf))

"""The Mistral family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    ORIGINAL,
    common_fields,
    integer,
    layer_count,
    layer_windows,
    number,
    rotary_object,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers
from mpjax.models.mlp import GatedMLPSpec


class Mistral(Decoder):
    """Mistral: Llama with a sliding window in every layer (null: none)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `MistralForCausalLM` config.json."""
        windows = layer_windows(hf, sliding_window(hf))
        layers = llama_layers(windows, integer(hf, "intermediate_size"))
        return DecoderConfig(**common_fields(hf), layers=layers)


class Ministral3(Decoder):
    """Ministral 3: Mistral with YaRN and position-dependent query scaling (as in Llama 4)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
        "eos_token_id": 2,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Ministral3ForCausalLM` config.json."""
        rope, where = rotary_object(hf), "config.json, rotary scaling"
        attention = GroupedQuerySpec(
            sliding_window(hf),
            growth=float(number(rope, "llama_4_scaling_beta", where=where)),
            growth_context=integer(rope, ORIGINAL),
        )
        layer = LayerSpec(attention, GatedMLPSpec(integer(hf, "intermediate_size")))
        return DecoderConfig(**common_fields(hf), layers=(layer,) * layer_count(hf))

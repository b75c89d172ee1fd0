"""Llama 1 to 3.x, and what shares its class: Yi, DeepSeek-R1's Llama distills, and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.models.config import DecoderConfig, common_fields
from mpjax.models.decoder import Decoder


class Llama(Decoder):
    """Llama: grouped-query attention, SiLU-gated MLP, llama3 rotary scaling from 3.1 on."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `LlamaForCausalLM` config.json."""
        bias = hf.get("attention_bias") or False
        return DecoderConfig(
            **common_fields(hf),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=hf.get("mlp_bias") or False,
        )

"""Seed-OSS of ByteDance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import common_fields, flag, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers


class SeedOss(Decoder):
    """Seed-OSS: Llama with biases on query, key and value; head_dim independent of hidden_size."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "eos_token_id": 2,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `SeedOssForCausalLM` config.json."""
        layers = llama_layers(
            (None,) * layer_count(hf),
            integer(hf, "intermediate_size"),
            qkv_bias=flag(hf, "attention_bias"),
            output_bias=flag(hf, "attention_out_bias"),
            mlp_bias=flag(hf, "mlp_bias"),
        )
        return DecoderConfig(**common_fields(hf), layers=layers)

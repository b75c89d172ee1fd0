"""Phi-3, Phi-3.5 and Phi-4, whose files hold query, key and value as one map, and gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import common_fields, integer, layer_count, sliding_window
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers
from mpjax.models.parameters import NAMES, Names


class Phi3(Decoder):
    """Phi-3: Llama with joined maps, and with LongRoPE and a part of each head rotated in some."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention.qkv": "model.layers.{layer}.self_attn.qkv_proj",
        "mlp.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Phi3ForCausalLM` config.json."""
        windows = (sliding_window(hf),) * layer_count(hf)
        layers = llama_layers(windows, integer(hf, "intermediate_size"))
        return DecoderConfig(**common_fields(hf, partial_rotary=True), layers=layers)

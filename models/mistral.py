"""The Mistral family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import common_fields, integer, layer_windows, sliding_window
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers


class Mistral(Decoder):
    """Mistral: Llama with a sliding window over the keys in every layer (null: none)."""

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

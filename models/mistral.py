"""The Mistral family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import common_fields, integer, layer_windows, sliding_window
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers


class Mistral(Decoder):
    """Mistral: Llama with a sliding window over the keys in every layer (null: none)."""

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `MistralForCausalLM` config.json."""
        # A file without the key means 4096; null means no window.
        windows = layer_windows(hf, sliding_window(hf, 4096))
        layers = llama_layers(windows, integer(hf, "intermediate_size"))
        return DecoderConfig(**common_fields(hf), layers=layers)

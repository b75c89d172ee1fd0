"""Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.models.config import DecoderConfig, common_fields, layer_windows, sliding_window
from mpjax.models.decoder import Decoder


class Mistral(Decoder):
    """Mistral: Llama with a sliding window over the keys in every layer (null: none)."""

    @classmethod
    def config_from_hf(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `MistralForCausalLM` config.json."""
        # 4096 is what a file without the key means; null means no window.
        windows = layer_windows(hf, sliding_window(hf, 4096))
        return DecoderConfig(**(common_fields(hf) | {"windows": windows}))

"""Qwen2, Qwen2.5, QwQ and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    later_windows,
    layer_count,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers

_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types` if the file has that list.

    Otherwise the window applies from layer `max_window_layers` on, if `use_sliding_window` is true.
    """
    window = sliding_window(hf) if flag(hf, "use_sliding_window") else None
    if window is None:
        return (None,) * layer_count(hf)
    return later_windows(hf, window)


class Qwen2(Decoder):
    """Qwen2 and 2.5: Llama with biases on the query, key and value projections."""

    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen2ForCausalLM` config.json."""
        layers = llama_layers(_windows(hf), integer(hf, "intermediate_size"), qkv_bias=True)
        return DecoderConfig(**common_fields(hf), layers=layers)


class Qwen3(Decoder):
    """Qwen3: Llama with QK-norm before RoPE."""

    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "head_dim": 128}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen3ForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        layers = llama_layers(
            _windows(hf),
            integer(hf, "intermediate_size"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
        )
        return DecoderConfig(**common_fields(hf), layers=layers)

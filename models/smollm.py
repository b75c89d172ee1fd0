"""SmolLM3. SmolLM and SmolLM2 are Llamas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    layer_count,
    layer_windows,
    sliding_window,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers


class SmolLM3(Decoder):
    """SmolLM3: Llama without RoPE in every fourth layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "eos_token_id": 128001,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `SmolLM3ForCausalLM` config.json."""
        bias, ropes = flag(hf, "attention_bias"), ropes_of(hf)
        layers = llama_layers(
            _windows(hf, ropes),
            integer(hf, "intermediate_size"),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=flag(hf, "mlp_bias"),
        )
        return DecoderConfig(
            **common_fields(hf, theta=2e6),
            layers=tuple(
                dataclasses.replace(layer, attention=_with_rope(layer.attention, rope))
                for layer, rope in zip(layers, ropes, strict=True)
            ),
        )


def _windows(hf: Mapping[str, Any], ropes: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer: by `layer_types`, else in the layers without RoPE.

    Raises ConfigError for layers with a window in a file whose use_sliding_window is not true.
    """
    is_used = flag(hf, "use_sliding_window")
    window = sliding_window(hf)
    if hf.get("layer_types"):
        windows = layer_windows(hf, window)
        if not is_used and any(windows):
            expected = "true, since layer_types lists sliding_attention"
            config_checks.refuse(WHERE, "use_sliding_window", False, expected)
        return windows
    return tuple(window if is_used and rope == "none" else None for rope in ropes)


def ropes_of(hf: Mapping[str, Any]) -> list[str]:
    """The kind of each layer's RoPE: `none` where `no_rope_layers` has 0."""
    layers, every = layer_count(hf), integer(hf, "no_rope_layer_interval")
    listed = hf.get("no_rope_layers")
    if listed is None:
        listed = [int((index + 1) % every != 0) for index in range(layers)]
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(x not in (0, 1) for x in listed)
    ):
        config_checks.refuse(WHERE, "no_rope_layers", listed, f"a list of {layers} of 0 and 1")
    return ["global" if has_rope else "none" for has_rope in listed]


def _with_rope(spec: Any, rope: str) -> Any:
    return dataclasses.replace(spec, rope=rope)

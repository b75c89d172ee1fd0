"""SmolLM3. SmolLM and SmolLM2 are Llamas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpjax.models import config_checks
from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import (
    WHERE,
    common_fields,
    flag,
    integer,
    layer_count,
    layer_windows,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers


class SmolLM3(Decoder):
    """SmolLM3: Llama whose every fourth layer has no rotary embedding."""

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `SmolLM3ForCausalLM` config.json."""
        window = sliding_window(hf) if flag(hf, "use_sliding_window") else None
        bias = flag(hf, "attention_bias")
        layers = llama_layers(
            layer_windows(hf, window) if window else (None,) * layer_count(hf),
            integer(hf, "intermediate_size"),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=flag(hf, "mlp_bias"),
        )
        ropes = _ropes(hf)
        hf = {"tie_word_embeddings": True, "rope_theta": 2e6, **hf}
        return DecoderConfig(
            **common_fields(hf),
            layers=tuple(
                dataclasses.replace(
                    layer, attention=dataclasses.replace(layer.attention, rope=rope)
                )
                for layer, rope in zip(layers, ropes, strict=True)
            ),
        )


def _ropes(hf: Mapping[str, Any]) -> list[str]:
    """The rotary embedding of each layer: `no_rope_layers` has 0 for those without one."""
    layers, every = layer_count(hf), integer(hf, "no_rope_layer_interval", 4)
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

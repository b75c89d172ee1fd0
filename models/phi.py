"""Phi-3, Phi-3.5 and Phi-4, whose files have fused QKV and fused gate/up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.config import DecoderConfig
from mpjax.models.config_json import (
    ORIGINAL,
    ROTARY_KEYS,
    common_fields,
    integer,
    layer_count,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.llama import llama_layers
from mpjax.models.parameters import NAMES, Names


class Phi3(Decoder):
    """Phi-3: Llama with fused QKV and gate/up; some models have LongRoPE or partial RoPE."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention.qkv": "model.layers.{layer}.self_attn.qkv_proj",
        "mlp.gate_up": "model.layers.{layer}.mlp.gate_up_proj",
    }

    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 4096,
        ORIGINAL: 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Phi3ForCausalLM` config.json."""
        windows = (sliding_window(hf),) * layer_count(hf)
        layers = llama_layers(windows, integer(hf, "intermediate_size"))
        fields = common_fields(_as_longrope(hf), partial_rotary=True)
        return DecoderConfig(**fields, layers=layers)


def _as_longrope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config's keys with LongRoPE under its own name: Phi-3's first files call it `yarn`."""
    renamed = dict(hf)
    for key in ROTARY_KEYS:
        if isinstance(written := hf.get(key), Mapping):
            names = {
                name: "longrope" for name in ("rope_type", "type") if written.get(name) == "yarn"
            }
            renamed[key] = {**written, **names}
    return renamed

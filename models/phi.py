"""Phi-3, Phi-3.5 and Phi-4, whose files have fused QKV and fused gate/up; and PhiMoE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    ORIGINAL,
    ROTARY,
    ROTARY_KEYS,
    common_fields,
    expert_count,
    flag,
    integer,
    layer_count,
    layer_windows,
    number,
    rotary_object,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.llama import llama_layers
from mpjax.models.mixtral import Mixtral
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


class PhiMoE(Decoder):
    """Phi-3.5-MoE: two experts per token, weighted by SparseMixer; LayerNorm; biases everywhere."""

    names: ClassVar[Names] = Mixtral.names
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        **{"num_local_experts": 16, "router_jitter_noise": 0.01, "eos_token_id": 2},
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"num_experts_per_tok": (None, 2)}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `PhimoeForCausalLM` config.json."""
        rope = rotary_object(hf)
        common = common_fields({**hf, ORIGINAL: rope.get(ORIGINAL)}, theta=1e6)
        if (scaling := common["rope_scaling"]) is not None:
            short, long = (number(rope, f"{x}_mscale", where=ROTARY) for x in ("short", "long"))
            if short != long:
                config_checks.refuse(ROTARY, "long_mscale", long, f"{short}, the short_mscale")
            common["rope_scaling"] = dataclasses.replace(scaling, attention_factor=float(short))
        bias = flag(hf, "attention_bias")
        mlp = ExpertsSpec(
            integer(hf, "intermediate_size"),
            num_experts=expert_count(hf),
            scoring="sparsemixer",
            renormalize=False,
            jitter=number(hf, "router_jitter_noise"),
        )
        layers = tuple(
            LayerSpec(GroupedQuerySpec(window, bias, bias), mlp)
            for window in layer_windows(hf, sliding_window(hf))
        )
        return DecoderConfig(
            **common,
            layers=layers,
            centered_norms=True,
            norm_bias=True,
            head_bias=flag(hf, "lm_head_bias"),
        )


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

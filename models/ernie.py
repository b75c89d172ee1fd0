"""ERNIE 4.5 of Baidu."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, ArrayPlace, Names, expert_names

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


class Ernie45(Decoder):
    """ERNIE 4.5: Llama with interleaved RoPE."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Ernie4_5ForCausalLM` config.json."""
        bias = flag(hf, "use_bias")
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"), bias)
        layer = LayerSpec(GroupedQuerySpec(None, bias, bias, interleaved=True), mlp)
        return DecoderConfig(**common_fields(hf, theta=5e5), layers=(layer,) * layer_count(hf))


class Ernie45MoE(Decoder):
    """ERNIE 4.5 with experts in some layers; softmax router with a selection bias."""

    names: ClassVar[Names] = {
        **NAMES,
        **expert_names(),
        "mlp.router_correction": "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias",
    }
    # The MTP layer, and its maps and norms.
    spare: ClassVar[tuple[str, ...]] = ("model.mtp_",)
    aliases: ClassVar[Mapping[str, str]] = {
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "moe_norm_min": (None, 1e-12),  # a clamp that the sum of softmax weights never reaches
        "use_bias": (None, False),  # with biases, the head has one, too
    }

    @classmethod
    def array_places(cls, config: DecoderConfig) -> list[ArrayPlace]:
        """Places of parameters outside linear maps; selection biases have a leading axis of 1."""
        return [
            dataclasses.replace(place, leading=int(place.path.endswith("router_correction")))
            for place in super().array_places(config)
        ]

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Ernie4_5_MoeForCausalLM` config.json."""
        inner = integer(hf, "moe_intermediate_size")
        shared = integer(hf, "moe_num_shared_experts", minimum=0)
        experts = ExpertsSpec(
            inner,
            num_experts=integer(hf, "moe_num_experts"),
            experts_per_token=integer(hf, "moe_k"),
            router_correction=True,
            shared_size=shared * inner or None,
        )
        attention = GroupedQuerySpec(None, interleaved=True)
        mlps = GatedMLPSpec(integer(hf, "intermediate_size")), experts
        layers = tuple(LayerSpec(attention, mlps[has_experts]) for has_experts in _mixtures(hf))
        return DecoderConfig(**common_fields(hf, theta=5e5), layers=layers)


def _mixtures(hf: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has experts."""
    count, every = layer_count(hf), integer(hf, "moe_layer_interval")
    first = integer(hf, "moe_layer_start_index", minimum=0)
    last = integer(hf, "moe_layer_end_index", minimum=-1)
    last = count - 1 if last == -1 else last
    return [(layer + 1) % every == 0 and first <= layer <= last for layer in range(count)]

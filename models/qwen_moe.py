"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    expert_count,
    flag,
    integer,
    layer_count,
    layer_windows,
    sliding_window,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

_MLP = "model.layers.{layer}.mlp"
_NAMES: Names = {
    **NAMES,  # some layers may have a gated MLP
    "mlp.router": f"{_MLP}.gate.weight",
    "mlp.experts.gate_up": tuple(f"{_MLP}.experts.{{expert}}.{w}_proj" for w in ("gate", "up")),
    "mlp.experts.down": f"{_MLP}.experts.{{expert}}.down_proj",
    "mlp.shared.gate_up": tuple(f"{_MLP}.shared_expert.{w}_proj" for w in ("gate", "up")),
    "mlp.shared.down": f"{_MLP}.shared_expert.down_proj",
    "mlp.shared_gate": f"{_MLP}.shared_expert_gate.weight",
}


_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
}


class Qwen2MoE(Decoder):
    """Qwen2-MoE: Qwen2 with experts, and an MLP for all tokens with a gate of its own."""

    names: ClassVar[Names] = _NAMES
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 16,
        "max_window_layers": 28,
        "num_experts_per_tok": 4,
        "num_local_experts": 60,
        "qkv_bias": True,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen2MoeForCausalLM` config.json."""
        shared = integer(hf, "shared_expert_intermediate_size")
        experts = dataclasses.replace(_experts(hf), shared_size=shared, shared_gate=True)
        bias, windows = flag(hf, "qkv_bias"), _alternating_windows(hf)
        return _config(hf, [GroupedQuerySpec(window, bias) for window in windows], experts)


class Qwen3MoE(Decoder):
    """Qwen3-MoE: Qwen3 with experts."""

    names: ClassVar[Names] = _NAMES
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Qwen3MoeForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        window = sliding_window(hf) if flag(hf, "use_sliding_window") else None
        attention = GroupedQuerySpec(window, bias, bias, qk_norm=True)
        return _config(hf, [attention] * layer_count(hf), _experts(hf))


def _experts(hf: Mapping[str, Any]) -> ExpertsSpec:
    """The spec of a layer's experts."""
    return ExpertsSpec(
        integer(hf, "moe_intermediate_size"),
        num_experts=expert_count(hf),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        renormalize=flag(hf, "norm_topk_prob"),
    )


def _alternating_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows by `layer_types`; without, in every other of the first `max_window_layers` layers."""
    layers = layer_count(hf)
    if not flag(hf, "use_sliding_window"):
        return (None,) * layers
    window = sliding_window(hf)
    if hf.get("layer_types"):
        return layer_windows(hf, window)
    most = integer(hf, "max_window_layers", minimum=0)
    return tuple(window if layer % 2 == 0 and layer < most else None for layer in range(layers))


def _config(
    hf: Mapping[str, Any], attentions: Sequence[GroupedQuerySpec], experts: ExpertsSpec
) -> DecoderConfig:
    """The configuration with experts in every `decoder_sparse_step`-th layer.

    Layers that `mlp_only_layers` lists, and all others, have a gated MLP.
    """
    count, step = len(attentions), integer(hf, "decoder_sparse_step")
    listed = hf.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < count for i in listed):
        expected = f"a list of layers from 0 to {count - 1}"
        config_checks.refuse(WHERE, "mlp_only_layers", listed, expected)
    layers = []
    for number, attention in enumerate(attentions):
        if number in listed or (number + 1) % step:
            layers.append(LayerSpec(attention, GatedMLPSpec(integer(hf, "intermediate_size"))))
        else:
            layers.append(LayerSpec(attention, experts))
    return DecoderConfig(**common_fields(hf), layers=tuple(layers))

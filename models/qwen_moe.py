"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, MixerSpec
from mpjax.models.config_json import (
    common_fields,
    expert_count,
    flag,
    integer,
    layer_count,
    layer_numbers,
    layer_windows,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

_MLP = "model.layers.{layer}.mlp"
MIXTURE_NAMES: Names = {
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
    """Qwen2-MoE: Qwen2 with experts, and a shared expert with a gate."""

    names: ClassVar[Names] = MIXTURE_NAMES
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
        experts = experts_with_shared(hf)
        bias, windows = flag(hf, "qkv_bias"), _alternating_windows(hf)
        mixers = [GroupedQuerySpec(window, bias) for window in windows]
        return DecoderConfig(**common_fields(hf), layers=mixture_layers(hf, mixers, experts))


class Qwen3MoE(Decoder):
    """Qwen3-MoE: Qwen3 with experts."""

    names: ClassVar[Names] = MIXTURE_NAMES
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
        layers = mixture_layers(hf, [attention] * layer_count(hf), _experts(hf))
        return DecoderConfig(**common_fields(hf), layers=layers)


def _experts(hf: Mapping[str, Any]) -> ExpertsSpec:
    """The spec of a layer's experts."""
    return ExpertsSpec(
        integer(hf, "moe_intermediate_size"),
        num_experts=expert_count(hf),
        experts_per_token=integer(hf, "num_experts_per_tok"),
        renormalize=flag(hf, "norm_topk_prob"),
    )


def experts_with_shared(hf: Mapping[str, Any]) -> ExpertsSpec:
    """The spec of a layer's experts, with a gated shared expert."""
    shared = integer(hf, "shared_expert_intermediate_size")
    return dataclasses.replace(_experts(hf), shared_size=shared, shared_gate=True)


def _alternating_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Windows: by `layer_types`, else in every other of the first `max_window_layers` layers."""
    layers = layer_count(hf)
    if not flag(hf, "use_sliding_window"):
        return (None,) * layers
    window = sliding_window(hf)
    if hf.get("layer_types"):
        return layer_windows(hf, window)
    most = integer(hf, "max_window_layers", minimum=0)
    return tuple(window if layer % 2 == 0 and layer < most else None for layer in range(layers))


def mixture_layers(
    hf: Mapping[str, Any], mixers: Sequence[MixerSpec], experts: ExpertsSpec
) -> tuple[LayerSpec, ...]:
    """The specs of layers, with experts in every `decoder_sparse_step`-th layer.

    Layers in `mlp_only_layers`, and all remaining layers, have a gated MLP.
    """
    step, listed = integer(hf, "decoder_sparse_step"), layer_numbers(hf, "mlp_only_layers")
    layers = []
    for number, mixer in enumerate(mixers):
        if number in listed or (number + 1) % step:
            layers.append(LayerSpec(mixer, GatedMLPSpec(integer(hf, "intermediate_size"))))
        else:
            layers.append(LayerSpec(mixer, experts))
    return tuple(layers)

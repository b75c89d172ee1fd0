"""LFM2 and LFM2-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models import config_json
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, MLPSpec, SublayerSpec
from mpjax.models.config_json import (
    common_fields,
    expert_count,
    flag,
    integer,
    layer_count,
    number,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names
from mpjax.models.short_conv import ShortConvSpec

_LAYER = "model.layers.{layer}"
_MLP = f"{_LAYER}.feed_forward"
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "conv_L_cache": 3,
}


class Lfm2(Decoder):
    """LFM2: short convolutions in most layers, and attention with QK-norm in the others."""

    names: ClassVar[Names] = {
        **NAMES,
        "norm.weight": "model.embedding_norm.weight",
        "attention_norm.weight": f"{_LAYER}.operator_norm.weight",
        "attention.query_norm.weight": f"{_LAYER}.self_attn.q_layernorm.weight",
        "attention.key_norm.weight": f"{_LAYER}.self_attn.k_layernorm.weight",
        "attention.output": f"{_LAYER}.self_attn.out_proj",
        "mlp_norm.weight": f"{_LAYER}.ffn_norm.weight",
        "mlp.gate_up": (f"{_MLP}.w1", f"{_MLP}.w3"),
        "mlp.down": f"{_MLP}.w2",
        "attention.in_proj": f"{_LAYER}.conv.in_proj",
        "attention.conv": f"{_LAYER}.conv.conv.weight",
        "attention.conv_bias": f"{_LAYER}.conv.conv.bias",
        "attention.out_proj": f"{_LAYER}.conv.out_proj",
    }
    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, ShortConvSpec)
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Lfm2ForCausalLM` config.json."""
        layers = layer_count(hf)
        if hf.get("layer_types") is None:
            listed = hf.get("full_attn_idxs")
            listed = (
                range(layers) if listed is None else config_json.layer_numbers(hf, "full_attn_idxs")
            )
            kinds = ["full_attention" if i in listed else "conv" for i in range(layers)]
            hf = {**hf, "layer_types": kinds}
        size = "intermediate_size" if hf.get("block_ff_dim") is None else "block_ff_dim"
        return _config(hf, [GatedMLPSpec(_inner_size(hf, integer(hf, size)))] * layers)


class Lfm2MoE(Lfm2):
    """LFM2-MoE: LFM2 with experts in all layers but the first few."""

    names: ClassVar[Names] = {
        **Lfm2.names,
        "mlp.router": f"{_MLP}.gate.weight",
        "mlp.router_correction": f"{_MLP}.expert_bias",
        "mlp.experts.gate_up": (f"{_MLP}.experts.{{expert}}.w1", f"{_MLP}.experts.{{expert}}.w3"),
        "mlp.experts.down": f"{_MLP}.experts.{{expert}}.w2",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Lfm2MoeForCausalLM` config.json."""
        dense = integer(hf, "num_dense_layers", minimum=0)
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"))
        experts = ExpertsSpec(
            integer(hf, "moe_intermediate_size"),
            num_experts=expert_count(hf),
            experts_per_token=integer(hf, "num_experts_per_tok"),
            scoring="sigmoid",
            renormalize=flag(hf, "norm_topk_prob"),
            scale=number(hf, "routed_scaling_factor"),
            router_correction=flag(hf, "use_expert_bias"),
        )
        return _config(hf, [mlp if i < dense else experts for i in range(layer_count(hf))])


def _inner_size(hf: Mapping[str, Any], written: int) -> int:
    """The intermediate size of an MLP: `written`, or with block_auto_adjust_ff_dim 2/3 of it.

    Times the factor, if there is one, that is rounded up to a multiple of block_multiple_of.
    """
    if not flag(hf, "block_auto_adjust_ff_dim"):
        return written
    size = int(2 * written / 3)
    if hf["block_ffn_dim_multiplier"] is None:
        return size
    size = int(number(hf, "block_ffn_dim_multiplier") * size)
    unit = integer(hf, "block_multiple_of")
    return -(-size // unit) * unit


def _config(hf: Mapping[str, Any], mlps: Sequence[MLPSpec]) -> DecoderConfig:
    tied = "tie_word_embeddings" if hf.get("tie_embedding") is None else "tie_embedding"
    conv = ShortConvSpec(
        integer(hf, "hidden_size"), integer(hf, "conv_L_cache"), flag(hf, "conv_bias")
    )
    mixers = {"conv": conv, "full_attention": GroupedQuerySpec(qk_norm=True)}
    # No implementation uses the activation's name; the epsilon and the tying have other keys.
    common = {"hidden_act": "silu", "rms_norm_eps": hf["norm_eps"], "tie_word_embeddings": hf[tied]}
    return DecoderConfig(
        **common_fields({**hf, **common}, theta=1e6),
        layers=tuple(
            LayerSpec(mixers[kind], mlp)
            for kind, mlp in zip(config_json.layer_kinds(hf, mixers), mlps, strict=True)
        ),
    )

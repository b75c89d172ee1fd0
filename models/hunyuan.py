"""Hunyuan of Tencent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    ROTARY_KEYS,
    common_fields,
    flag,
    integer,
    layer_count,
    number,
    rotary_object,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names, expert_names

_ATTENTION = "model.layers.{layer}.self_attn"
_NAMES: Names = {
    **NAMES,
    "attention.query_norm.weight": f"{_ATTENTION}.query_layernorm.weight",
    "attention.key_norm.weight": f"{_ATTENTION}.key_layernorm.weight",
}
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 2}


class HunYuan(Decoder):
    """Hunyuan: Llama with QK-norm after RoPE."""

    names: ClassVar[Names] = _NAMES
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `HunYuanDenseV1ForCausalLM` config.json."""
        layer = LayerSpec(_attention(hf), GatedMLPSpec(integer(hf, "intermediate_size")))
        return DecoderConfig(**_common(hf), layers=(layer,) * layer_count(hf))


class HunYuanMoE(Decoder):
    """Hunyuan with experts, and a shared expert of the same size."""

    names: ClassVar[Names] = {
        **_NAMES,
        **expert_names(shared="shared_mlp"),
        "mlp.router": "model.layers.{layer}.mlp.gate.wg.weight",
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "num_experts_per_tok": "moe_topk",
        "num_local_experts": "num_experts",
    }
    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "num_experts": 1, "moe_topk": 1}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `HunYuanMoEV1ForCausalLM` config.json."""
        inner, count = integer(hf, "intermediate_size"), integer(hf, "num_experts")
        layers = tuple(
            LayerSpec(
                _attention(hf),
                ExpertsSpec(inner, num_experts=count, experts_per_token=best, shared_size=inner),
            )
            for best in _chosen(hf)
        )
        return DecoderConfig(**_common(hf), layers=layers)


def _attention(hf: Mapping[str, Any]) -> GroupedQuerySpec:
    bias = flag(hf, "attention_bias")
    return GroupedQuerySpec(None, bias, bias, qk_norm=True, norm_after=True)


def _chosen(hf: Mapping[str, Any]) -> list[int]:
    """The number of experts per token in each layer: `moe_topk` is one number, or a list."""
    listed, layers = hf["moe_topk"], layer_count(hf)
    if not isinstance(listed, list):
        return [integer(hf, "moe_topk")] * layers
    if len(listed) < layers or not all(type(each) is int and each > 0 for each in listed):
        config_checks.refuse(WHERE, "moe_topk", listed, f"{layers} positive integers")
    return listed[:layers]


def _common(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The common fields. `alpha` in the rotary scaling changes theta, for all lengths."""
    written = rotary_object(hf)
    if written.get("alpha") is None:
        return common_fields(hf)
    fields = common_fields({**hf, **dict.fromkeys(ROTARY_KEYS)})
    base = written if written.get("rope_theta") is not None else hf
    dim = fields["head_dim"]
    stretch = float(number(written, "alpha", where=f"{WHERE}, rotary scaling"))
    if dim > 2:
        fields["rope_theta"] = float(number(base, "rope_theta", 1e4)) * stretch ** (dim / (dim - 2))
    return fields

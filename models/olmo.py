"""OLMo 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    layer_count,
    patterned_windows,
    ropes_by_kind,
    rotary,
)
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

_LAYER = "model.layers.{layer}."
POST_NORMS: Names = {
    **NAMES,
    "attention_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
    "mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
}
THETA = 5e5  # OLMo 3's default rope_theta
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}


class Olmo2(Decoder):
    """OLMo 2: post-norms instead of pre-norms; QK-norm over all heads jointly."""

    names: ClassVar[Names] = POST_NORMS
    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Olmo2ForCausalLM` config.json."""
        return DecoderConfig(**common_fields(hf), layers=_layers(hf, (None,) * layer_count(hf)))


class Olmo3(Decoder):
    """OLMo 3: OLMo 2 with windows in 3 of 4 layers; RoPE scaling in full-attention layers only."""

    names: ClassVar[Names] = POST_NORMS
    defaults: ClassVar[Mapping[str, Any]] = {**_DEFAULTS, "sliding_window": 4096}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Olmo3ForCausalLM` config.json."""
        whole, local = ropes_by_kind({**hf, "rope_local_base_freq": None})
        theta, scaling = rotary(local, THETA)
        return DecoderConfig(
            **common_fields(whole, theta=THETA),
            layers=_layers(hf, patterned_windows(hf, 4)),
            local_rope_theta=theta,
            local_rope_scaling=scaling,
        )


def _layers(hf: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """The layers' specs; layers with a window have the local rotary embedding."""
    bias, mlp = flag(hf, "attention_bias"), GatedMLPSpec(integer(hf, "intermediate_size"))
    return tuple(
        LayerSpec(
            GroupedQuerySpec(
                *(window, bias, bias),
                qk_norm=True,
                joint_norm=True,
                rope="local" if window else "global",
            ),
            mlp,
            "post",
        )
        for window in windows
    )

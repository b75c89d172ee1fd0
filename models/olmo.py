"""OLMo 2, OLMo 3 and OLMo Hybrid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec, SublayerSpec
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    layer_count,
    layer_kinds,
    patterned_windows,
    ropes_by_kind,
    rotary,
)
from mpjax.models.decoder import Decoder
from mpjax.models.gated_delta import GatedDeltaSpec
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


_MIXER = f"{_LAYER}linear_attn"


class OlmoHybrid(Decoder):
    """OLMo Hybrid: OLMo 2 with Gated DeltaNet after pre-norms in 3 of 4 layers; often no RoPE."""

    specs: ClassVar[tuple[type[SublayerSpec], ...]] = (*Decoder.specs, GatedDeltaSpec)
    names: ClassVar[Names] = {
        **POST_NORMS,
        "attention.qkvz": tuple(f"{_MIXER}.{name}_proj" for name in "qkvg"),
        "attention.ba": (f"{_MIXER}.b_proj", f"{_MIXER}.a_proj"),
        "attention.query_conv": f"{_MIXER}.q_conv1d.weight",
        "attention.key_conv": f"{_MIXER}.k_conv1d.weight",
        "attention.value_conv": f"{_MIXER}.v_conv1d.weight",
        "attention.decay": f"{_MIXER}.A_log",
        "attention.shift": f"{_MIXER}.dt_bias",
        "attention.scale": f"{_MIXER}.o_norm.weight",
        "attention.out": f"{_MIXER}.o_proj",
    }
    renamed: ClassVar[Mapping[str, str]] = {
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"max_position_embeddings": 65536, "eos_token_id": 100257},
        **{"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `OlmoHybridForCausalLM` config.json."""
        common, count = common_fields(hf), layer_count(hf)
        usual = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
        if count < 4:
            usual[-1] = "full_attention"
        rope = hf.get("rope_parameters") or {}
        has_rope = None not in [rope.get(key, 0) for key in ("rope_type", "rope_theta")]
        [attending] = _layers(hf, (None,), "global" if has_rope else "none")
        known = {
            "full_attention": attending,
            "linear_attention": LayerSpec(_delta(hf, common["num_heads"]), attending.mlp),
        }
        kinds = layer_kinds({**hf, "layer_types": hf.get("layer_types") or usual}, known)
        return DecoderConfig(**common, layers=tuple(known[kind] for kind in kinds))


def _delta(hf: Mapping[str, Any], heads: int) -> GatedDeltaSpec:
    """The mixer of the layers without attention. heads: the default of its numbers of heads."""
    key_heads = integer(hf, "linear_num_key_heads", heads)
    usual = max(integer(hf, "hidden_size") * 3 // (4 * key_heads), 1)
    channels = integer(hf, "linear_key_head_dim", usual)
    return GatedDeltaSpec(
        key_heads,
        integer(hf, "linear_num_value_heads", heads),
        channels,
        integer(hf, "linear_value_head_dim", 2 * channels),
        integer(hf, "linear_conv_kernel_dim", minimum=2),
        split_conv=True,
        rate_scale=2.0 if flag(hf, "linear_allow_neg_eigval") else None,
        epsilon=1e-5,
    )


def _layers(
    hf: Mapping[str, Any], windows: Sequence[int | None], rope: str = "global"
) -> tuple[LayerSpec, ...]:
    """The layers' specs; layers with a window have the local rotary embedding, others `rope`."""
    bias, mlp = flag(hf, "attention_bias"), GatedMLPSpec(integer(hf, "intermediate_size"))
    return tuple(
        LayerSpec(
            GroupedQuerySpec(
                *(window, bias, bias),
                qk_norm=True,
                joint_norm=True,
                rope="local" if window else rope,
            ),
            mlp,
            "post",
        )
        for window in windows
    )

"""Gemma, Gemma 2, and the text models of Gemma 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models import config_json
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count, patterned_windows
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

ACTIVATION = "gelu_pytorch_tanh"
_LAYER = "model.layers.{layer}."
_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": (None, ACTIVATION),
    "use_bidirectional_attention": (None, False),
}


class Gemma(Decoder):
    """Gemma: a scaled embedding, GELU, and RMSNorm weights that files store minus 1."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "num_key_value_heads": 16,
    }
    # Files with `gelu` mean the tanh approximation, too.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "hidden_act": (None, "gelu", ACTIVATION),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GemmaForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        return _config(hf, [GroupedQuerySpec(None, bias, bias)] * layer_count(hf), "pre")


class Gemma2(Decoder):
    """Gemma 2: pre- and post-norms, softcaps, a sliding window in every other layer."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "mlp_norm.weight": f"{_LAYER}pre_feedforward_layernorm.weight",
        "mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = _NEUTRAL

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Gemma2ForCausalLM` config.json."""
        windows = patterned_windows(hf, 2)
        return _config(hf, [GroupedQuerySpec(window, **_attention(hf)) for window in windows])


class Gemma3(Gemma2):
    """Gemma 3: QK-norm, sliding windows in five of six layers, and two rotary embeddings.

    Layers with a window have a rotary embedding with another theta.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False, True),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Gemma3ForCausalLM` config.json."""
        whole, local = config_json.ropes_by_kind(hf)
        reads_all = flag(hf, "use_bidirectional_attention")  # EmbeddingGemma
        theta, scaling = config_json.rotary(local, 1e4)
        specs = [
            GroupedQuerySpec(
                window // 2 + 1 if window and reads_all else window,
                qk_norm=True,
                **_attention(hf),
                rope="local" if window else "global",
                bidirectional=reads_all,
            )
            for window in patterned_windows(hf)
        ]
        config = _config(
            whole, specs, theta=1e6, local_rope_theta=theta, local_rope_scaling=scaling
        )
        # Linear scaling is already included in the max_position_embeddings of these files.
        positions = integer(hf, "max_position_embeddings")
        return dataclasses.replace(
            config, max_position_embeddings=positions, predicts=not reads_all
        )


def _attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of all attention specs: biases, and the scale and softcap of scores."""
    bias = flag(hf, "attention_bias")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "scale": config_json.number(hf, "query_pre_attn_scalar") ** -0.5,
        "softcap": config_json.optional(hf, "attn_logit_softcapping"),
    }


def _config(
    hf: Mapping[str, Any], specs: Sequence[GroupedQuerySpec], norms: str = "both", **fields: Any
) -> DecoderConfig:
    mlp = GatedMLPSpec(integer(hf, "intermediate_size"), activation="gelu")
    layers = [LayerSpec(spec, mlp, norms) for spec in specs]
    return config_of(hf, layers, offset_norms=True, **fields)


def config_of(
    hf: Mapping[str, Any], layers: Sequence[LayerSpec], *, theta: float = 1e4, **fields: Any
) -> DecoderConfig:
    """The configuration of a model of these layers. theta: the default of rotary embeddings."""
    # No implementation of Gemma 2 and 3 uses `hidden_act`, which their first files also have.
    hf = {**hf, "hidden_act": ACTIVATION}
    common = common_fields(hf, activation=ACTIVATION, theta=theta)
    return DecoderConfig(
        **common | fields,
        layers=tuple(layers),
        embedding_scale=common["hidden_size"] ** 0.5,
        logit_softcap=config_json.optional(hf, "final_logit_softcapping"),
    )

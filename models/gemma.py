"""Gemma, Gemma 2, and the text models of Gemma 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models import config_json
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import ConfigError, DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count, layer_windows
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names

ACTIVATION = "gelu_pytorch_tanh"
# Values of keys that Hugging Face's classes have where a file lacks them.
DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "rms_norm_eps": 1e-6}
_LAYER = "model.layers.{layer}."
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


class Gemma(Decoder):
    """Gemma: a scaled embedding, GELU, and weights of norms that files hold minus 1."""

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GemmaForCausalLM` config.json."""
        hf = _with_defaults(hf)
        specs = [GroupedQuerySpec(qkv_bias=flag(hf, "attention_bias"))] * layer_count(hf)
        return _config(hf, specs, "pre")


class Gemma2(Decoder):
    """Gemma 2: norms before and after each half, softcaps, a window in every other layer."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "mlp_norm.weight": f"{_LAYER}pre_feedforward_layernorm.weight",
        "mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Gemma2ForCausalLM` config.json."""
        hf = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **_with_defaults(hf)}
        windows = _windows(hf, 4096, every=2)
        return _config(hf, [GroupedQuerySpec(window, **_attention(hf)) for window in windows])


class Gemma3(Gemma2):
    """Gemma 3: norms of query and key heads, and two rotary embeddings.

    Five of six layers have a window and a rotary embedding with a theta of their own.
    """

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Gemma3ForCausalLM` config.json."""
        hf, local_theta = _ropes(_with_defaults(hf))
        if hf.get("use_bidirectional_attention"):
            raise ConfigError(
                "config.json: use_bidirectional_attention is true, which is not supported: the "
                "model is no decoder"
            )
        every = integer(hf, "sliding_window_pattern", 6)
        specs = [
            GroupedQuerySpec(
                window, qk_norm=True, **_attention(hf), rope="local" if window else "global"
            )
            for window in _windows(hf, 4096, every)
        ]
        # Linear scaling has made room for the positions that these files have.
        positions = integer(hf, "max_position_embeddings", 131072)
        config = _config(hf, specs, local_rope_theta=local_theta)
        return dataclasses.replace(config, max_position_embeddings=positions)


def _with_defaults(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file, with those that it may leave out.

    A null key counts as missing, except softcaps, where null means no softcap.
    Files have `hidden_activation`; `hidden_act` of the first ones is not what they were trained
    with, and no implementation reads it.
    """
    written = {key: value for key, value in hf.items() if value is not None or key in SOFTCAPS}
    written["hidden_act"] = written.get("hidden_activation", ACTIVATION)
    return {**DEFAULTS, **written}


def _windows(hf: Mapping[str, Any], default: int, every: int) -> tuple[int | None, ...]:
    """The window of each layer: none in every n-th, unless the file lists the types."""
    window = config_json.sliding_window(hf, default)
    if hf.get("layer_types"):
        return layer_windows(hf, window)
    return tuple(None if (i + 1) % every == 0 else window for i in range(layer_count(hf)))


def _attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the attention specs: biases, the scale and the softcap of scores."""
    bias, cap = flag(hf, "attention_bias"), hf.get("attn_logit_softcapping")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "scale": config_json.number(hf, "query_pre_attn_scalar", 256) ** -0.5,
        "softcap": None if cap is None else config_json.number(hf, "attn_logit_softcapping"),
    }


def _ropes(hf: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The keys with those of the global rotary embedding alone, and theta of the local one.

    Newer files have an object for each kind of layer in `rope_parameters`.
    """
    nested = hf.get("rope_parameters")
    if isinstance(nested, Mapping) and isinstance(nested.get("full_attention"), Mapping):
        local = nested.get("sliding_attention")
        local = local if isinstance(local, Mapping) else {}
        hf = {**hf, "rope_parameters": nested["full_attention"]}
        return hf, float(config_json.number(local, "rope_theta", 1e4))
    hf.setdefault("rope_theta", 1e6)
    return hf, float(config_json.number(hf, "rope_local_base_freq", 1e4))


def _config(
    hf: Mapping[str, Any], specs: Sequence[GroupedQuerySpec], norms: str = "both", **fields: Any
) -> DecoderConfig:
    common = common_fields(hf, activation=ACTIVATION)
    mlp, cap = GatedMLPSpec(integer(hf, "intermediate_size"), activation="gelu"), None
    if hf.get("final_logit_softcapping") is not None:
        cap = config_json.number(hf, "final_logit_softcapping")
    return DecoderConfig(
        **common | fields,
        layers=tuple(LayerSpec(spec, mlp, norms) for spec in specs),
        offset_norms=True,
        embedding_scale=common["hidden_size"] ** 0.5,
        logit_softcap=cap,
    )

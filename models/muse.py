"""The text model of Muse Glimmer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models import config_checks, parameters
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    integer,
    layer_count,
    layer_windows,
    number,
    sliding_window,
)
from mpjax.models.config_keys import WHERE
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, ArrayPlace, Names

_LAYER = "model.layers.{layer}."


class MuseGlimmer(Decoder):
    """Muse Glimmer: windows in 3 of 4 layers, no RoPE in the others; an output gate; many norms."""

    names: ClassVar[Names] = {
        **NAMES,
        "attention_post_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "mlp_norm.weight": f"{_LAYER}pre_feedforward_layernorm.weight",
        "mlp_post_norm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
        "attention.qkv": tuple(f"{_LAYER}self_attn.{x}_proj" for x in ("q", "k", "v", "gate")),
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        **{"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "post_norm_eps": 1e-8, "sliding_window": 2048},
        **{"final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "eos_token_id": 200001},
        "output_multiplier": 0.19611613513818404,
    }
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_activation": (None, "silu"),
        "attention_bias": (None, False),
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads the text model's config.json of a `MuseGlimmerForConditionalGeneration`."""
        common, count = common_fields(hf), layer_count(hf)
        whole = [(count - 1 - layer) % 4 == 0 for layer in range(count)]
        usual = [("sliding_attention", "full_attention")[each] for each in whole]
        kinds = {**hf, "layer_types": hf.get("layer_types") or usual}
        thetas, known = hf.get("layer_rope_theta"), (0, common["rope_theta"])
        if thetas is None:
            thetas = [known[not each] for each in whole]
        is_list = isinstance(thetas, list) and len(thetas) == count
        if not is_list or any(theta not in known for theta in thetas):
            expected = f"a list of {count} of {known[1]}, the model's rope_theta, and 0"
            config_checks.refuse(WHERE, "layer_rope_theta", thetas, expected)
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"))
        layers = tuple(
            LayerSpec(
                GroupedQuerySpec(
                    window,
                    qk_norm=True,
                    norm_weights=False,
                    scale=float(number(hf, "qk_scale_factor")) * common["head_dim"] ** -0.5,
                    gate_map=True,
                    rope="global" if theta else "none",
                ),
                mlp,
                "both",
            )
            for window, theta in zip(layer_windows(kinds, sliding_window(hf)), thetas, strict=True)
        )
        return DecoderConfig(
            **common,
            layers=layers,
            offset_norms=True,
            embedding_norm=True,
            post_norm_eps=number(hf, "post_norm_eps"),
            logit_scale=float(number(hf, "output_multiplier")),
            logit_softcap=float(number(hf, "final_logit_softcapping")),
        )

    @classmethod
    def array_places(cls, config: DecoderConfig) -> list[ArrayPlace]:
        """Places of all parameters outside linear maps; the last norm's weight has no offset."""
        places = parameters.array_places(config, cls.names)
        plain = {"norm.weight"}
        return [dataclasses.replace(x, offset=0.0) if x.path in plain else x for x in places]

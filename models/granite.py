"""Granite 3, and the dense models of Granite 4 without Mamba2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count, number
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec


class Granite(Decoder):
    """Granite: Llama with factors of the embedding, the scores, the residual sums and the logits.

    transformers multiplies the outputs of both sublayers by residual_multiplier. Here the residual
    stream is divided by it instead, which changes norms only by their epsilon.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "eos_token_id": 2,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GraniteForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        attention = GroupedQuerySpec(
            None, bias, bias, scale=float(number(hf, "attention_multiplier"))
        )
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"), flag(hf, "mlp_bias"))
        return granite_config(hf, [LayerSpec(attention, mlp)] * layer_count(hf))


def granite_config(hf: Mapping[str, Any], layers: Sequence[LayerSpec]) -> DecoderConfig:
    """The configuration with these layers and Granite's factors."""
    residual, common = number(hf, "residual_multiplier"), common_fields(hf)
    common["rms_norm_eps"] /= residual**2
    return DecoderConfig(
        **common,
        layers=tuple(layers),
        embedding_scale=number(hf, "embedding_multiplier") / residual,
        logit_scale=1 / number(hf, "logits_scaling"),
    )

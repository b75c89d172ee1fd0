"""Granite 3's mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import expert_count, flag, integer, layer_count, number
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.granite import Granite, granite_config
from mpjax.models.granite_hybrid import GraniteHybrid
from mpjax.models.parameters import Names


class GraniteMoE(Decoder):
    """Granite 3 with experts: Granite's factors, and a shared expert in some models."""

    names: ClassVar[Names] = GraniteHybrid.names
    defaults: ClassVar[Mapping[str, Any]] = {
        **Granite.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GraniteMoeForCausalLM` or `GraniteMoeSharedForCausalLM` config.json."""
        shared = integer(hf, "shared_intermediate_size", minimum=0)
        bias = flag(hf, "attention_bias")
        mlp = ExpertsSpec(
            integer(hf, "intermediate_size"),
            num_experts=expert_count(hf),
            experts_per_token=integer(hf, "num_experts_per_tok"),
            shared_size=shared or None,
        )
        scale = float(number(hf, "attention_multiplier"))
        layer = LayerSpec(GroupedQuerySpec(None, bias, bias, scale=scale), mlp)
        return granite_config(hf, [layer] * layer_count(hf))

"""The Mixtral family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    expert_count,
    integer,
    layer_windows,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.parameters import NAMES, Names

_BLOCK = "model.layers.{layer}.block_sparse_moe"


class Mixtral(Decoder):
    """Mixtral: Mistral with a mixture of experts; a softmax over a token's experts weights them."""

    names: ClassVar[Names] = {
        **NAMES,
        "mlp.router": f"{_BLOCK}.gate.weight",
        "mlp.experts.gate_up": tuple(f"{_BLOCK}.experts.{{expert}}.{w}" for w in ("w1", "w3")),
        "mlp.experts.down": f"{_BLOCK}.experts.{{expert}}.w2",
    }

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": 2,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `MixtralForCausalLM` config.json."""
        mlp = ExpertsSpec(
            integer(hf, "intermediate_size"),
            num_experts=expert_count(hf),
            experts_per_token=integer(hf, "num_experts_per_tok"),
        )
        layers = tuple(
            LayerSpec(GroupedQuerySpec(window), mlp)
            for window in layer_windows(hf, sliding_window(hf))
        )
        return DecoderConfig(**common_fields(hf, theta=1e6), layers=layers)

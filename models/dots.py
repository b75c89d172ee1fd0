"""dots.llm1 of rednote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    flag,
    grouped_experts,
    integer,
    later_windows,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.parameters import NAMES, Names, expert_names


class Dots1(Decoder):
    """dots.llm1: Qwen3 with experts; sigmoid router with a selection bias, group-limited."""

    names: ClassVar[Names] = {**NAMES, **expert_names()}
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "n_routed_experts"}
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Dots1ForCausalLM` config.json."""
        bias, dense = flag(hf, "attention_bias"), integer(hf, "first_k_dense_replace", minimum=0)
        mlps = GatedMLPSpec(integer(hf, "intermediate_size")), ExpertsSpec(**grouped_experts(hf))
        layers = tuple(
            LayerSpec(GroupedQuerySpec(window, bias, bias, qk_norm=True), mlps[number >= dense])
            for number, window in enumerate(later_windows(hf, sliding_window(hf)))
        )
        return DecoderConfig(**common_fields(hf), layers=layers)

"""MiniMax M2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, expert_count, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.parameters import NAMES, Names, expert_names

_BLOCK = "model.layers.{layer}.block_sparse_moe"


class MiniMaxM2(Decoder):
    """MiniMax M2: Mixtral with QK-norm over all heads jointly; sigmoid router, selection bias."""

    names: ClassVar[Names] = {
        **NAMES,
        **expert_names(_BLOCK, ("w1", "w3", "w2")),
        "mlp.router_correction": f"{_BLOCK}.e_score_correction_bias",
    }
    has_spare_layers: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "eos_token_id": 200020,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `MiniMaxM2ForCausalLM` config.json."""
        if hf.get("rotary_dim") is not None and hf.get("partial_rotary_factor") is None:
            share = integer(hf, "rotary_dim") / integer(hf, "head_dim")
            hf = {**hf, "partial_rotary_factor": share}
        mlp = ExpertsSpec(
            integer(hf, "intermediate_size"),
            num_experts=expert_count(hf),
            experts_per_token=integer(hf, "num_experts_per_tok"),
            scoring="sigmoid",
            router_correction=True,
        )
        layer = LayerSpec(GroupedQuerySpec(None, qk_norm=True, joint_norm=True), mlp)
        fields = common_fields(hf, theta=5e6, partial_rotary=True)
        return DecoderConfig(**fields, layers=(layer,) * layer_count(hf))

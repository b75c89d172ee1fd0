"""The gpt-oss family of OpenAI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    expert_count,
    flag,
    integer,
    layer_count,
    layer_windows,
    number,
    sliding_window,
)
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.parameters import NAMES, Names

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_MLP = "model.layers.{layer}.mlp"


class GptOss(Decoder):
    """gpt-oss: experts with biases and a clamped gate, sinks, windows in every other layer."""

    names: ClassVar[Names] = {
        **NAMES,
        "mlp.router": f"{_MLP}.router.weight",
        "mlp.router_bias": f"{_MLP}.router.bias",
        "mlp.experts.gate_up": f"{_MLP}.experts.{{expert}}.gate_up_proj",
        "mlp.experts.down": f"{_MLP}.experts.{{expert}}.down_proj",
    }

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_parameters": YARN,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,  # factor inside the gate's sigmoid
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GptOssForCausalLM` config.json."""
        mlp = ExpertsSpec(
            integer(hf, "intermediate_size"),
            num_experts=expert_count(hf),
            experts_per_token=integer(hf, "num_experts_per_tok"),
            router_bias=True,
            bias=True,
            gate_limit=number(hf, "swiglu_limit"),
            gate_alpha=number(hf, "swiglu_alpha"),
            joint_files=True,
        )
        window, bias = sliding_window(hf), flag(hf, "attention_bias")
        windows = layer_windows(hf, window) if hf.get("layer_types") else _alternating(hf, window)
        layers = tuple(
            LayerSpec(GroupedQuerySpec(w, qkv_bias=bias, output_bias=bias, sinks=True), mlp)
            for w in windows
        )
        return DecoderConfig(**common_fields(hf, theta=150000.0), layers=layers)


def _alternating(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """The default of `layer_types`: a window in every other layer, beginning with the first."""
    return tuple(None if layer % 2 else window for layer in range(layer_count(hf)))

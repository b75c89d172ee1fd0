"""The gpt-oss family of OpenAI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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
from mpjax.models.decoder import Decoder
from mpjax.models.experts import ExpertsSpec
from mpjax.models.parameters import NAMES, Names

ALPHA = 1.702  # of the gate's sigmoid, which config.json does not have
_MLP = "model.layers.{layer}.mlp"


class GptOss(Decoder):
    """gpt-oss: experts with biases and a clamped gate, sinks, and windows in every other layer."""

    names: ClassVar[Names] = {
        **NAMES,
        "mlp.router": f"{_MLP}.router.weight",
        "mlp.router_bias": f"{_MLP}.router.bias",
        "mlp.experts.gate_up": f"{_MLP}.experts.{{expert}}.gate_up_proj",
        "mlp.experts.down": f"{_MLP}.experts.{{expert}}.down_proj",
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `GptOssForCausalLM` config.json."""
        mlp = ExpertsSpec(
            integer(hf, "intermediate_size"),
            num_experts=integer(hf, "num_local_experts", 128),
            experts_per_token=integer(hf, "num_experts_per_tok", 4),
            router_bias=True,
            bias=True,
            gate_limit=number(hf, "swiglu_limit", 7.0),
            gate_alpha=number(hf, "swiglu_alpha", ALPHA),
            joint_files=True,
        )
        window = sliding_window(hf, 128)
        windows = layer_windows(hf, window) if hf.get("layer_types") else _alternating(hf, window)
        layers = tuple(
            LayerSpec(GroupedQuerySpec(w, qkv_bias=True, output_bias=True, sinks=True), mlp)
            for w in windows
        )
        return DecoderConfig(**common_fields(hf), layers=layers)


def _alternating(hf: Mapping[str, Any], window: int | None) -> tuple[int | None, ...]:
    """The window in every other layer, from the first on: what files without a list mean."""
    return tuple(None if layer % 2 else window for layer in range(layer_count(hf)))

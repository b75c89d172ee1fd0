"""Llama 1 to 3.x, and models of the same class: Yi, DeepSeek-R1's Llama distills, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec


def llama_layers(
    windows: Sequence[int | None],
    intermediate_size: int,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    mlp_bias: bool = False,
) -> tuple[LayerSpec, ...]:
    """Specs of layers with grouped-query attention and a gated MLP that differ only in windows.

    windows: for each layer, the number of keys that a query attends to, its own included (None:
    all).
    """
    mlp = GatedMLPSpec(intermediate_size, mlp_bias)
    return tuple(
        LayerSpec(GroupedQuerySpec(window, qkv_bias, output_bias, qk_norm), mlp)
        for window in windows
    )


class Llama(Decoder):
    """Llama: grouped-query attention, SiLU-gated MLP, llama3 rotary scaling from 3.1 on."""

    defaults: ClassVar[Mapping[str, Any]] = {"eos_token_id": 2}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `LlamaForCausalLM` config.json."""
        bias = flag(hf, "attention_bias")
        layers = llama_layers(
            (None,) * layer_count(hf),
            integer(hf, "intermediate_size"),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=flag(hf, "mlp_bias"),
        )
        return DecoderConfig(**common_fields(hf), layers=layers)

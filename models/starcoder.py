"""StarCoder 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, flag, integer, layer_count, sliding_window
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import UngatedMLPSpec
from mpjax.models.parameters import NAMES, Names

ACTIVATION = "gelu_pytorch_tanh"


class Starcoder2(Decoder):
    """StarCoder 2: Llama with LayerNorm, an MLP without a gate, and biases everywhere."""

    names: ClassVar[Names] = {
        **NAMES,
        "mlp.up": "model.layers.{layer}.mlp.c_fc",
        "mlp.down": "model.layers.{layer}.mlp.c_proj",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "hidden_act": ACTIVATION,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
        "eos_token_id": 50256,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Starcoder2ForCausalLM` config.json."""
        bias = flag(hf, "use_bias")
        mlp = UngatedMLPSpec(integer(hf, "intermediate_size"), bias)
        layer = LayerSpec(GroupedQuerySpec(sliding_window(hf), bias, bias), mlp)
        return DecoderConfig(
            **common_fields(hf, activation=ACTIVATION, epsilon="norm_epsilon"),
            layers=(layer,) * layer_count(hf),
            centered_norms=True,
            norm_bias=True,
        )

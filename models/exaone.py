"""EXAONE 4.0 of LG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import common_fields, integer, layer_count, patterned_windows
from mpjax.models.config_json import sliding_window as window_of
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.olmo import POST_NORMS
from mpjax.models.parameters import Names


class Exaone4(Decoder):
    """EXAONE 4: post-norms and QK-norm; with windows, full-attention layers have no RoPE."""

    names: ClassVar[Names] = POST_NORMS
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "eos_token_id": 2,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads an `Exaone4ForCausalLM` config.json."""
        is_hybrid = window_of(hf) is not None
        windows = patterned_windows(hf) if is_hybrid else (None,) * layer_count(hf)
        mlp = GatedMLPSpec(integer(hf, "intermediate_size"))
        layers = tuple(
            LayerSpec(
                GroupedQuerySpec(
                    window, qk_norm=True, rope="global" if window or not is_hybrid else "none"
                ),
                mlp,
                "post",
            )
            for window in windows
        )
        return DecoderConfig(**common_fields(hf), layers=layers)

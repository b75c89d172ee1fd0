"""Cohere's Command R and Command A."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    layer_count,
    number,
    patterned_windows,
)
from mpjax.models.decoder import Decoder
from mpjax.models.mlp import GatedMLPSpec

_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}


class Cohere(Decoder):
    """Command R: parallel attention and MLP after one shared LayerNorm; interleaved RoPE."""

    defaults: ClassVar[Mapping[str, Any]] = _DEFAULTS
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (None, False)}

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `CohereForCausalLM` config.json."""
        return _config(hf, (None,) * layer_count(hf), theta=5e5)


class Cohere2(Decoder):
    """Command R7B and A: Command R with sliding windows; full-attention layers have no RoPE."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **_DEFAULTS,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def read_config(cls, hf: Mapping[str, Any]) -> DecoderConfig:
        """Reads a `Cohere2ForCausalLM` config.json."""
        return _config(hf, patterned_windows(hf), unrotated=None)


def _config(
    hf: Mapping[str, Any],
    windows: Sequence[int | None],
    *,
    theta: float = 1e4,
    unrotated: int | None = 0,
) -> DecoderConfig:
    """The configuration. unrotated: the window of layers without RoPE (0: no layer)."""
    bias, mlp = flag(hf, "attention_bias"), GatedMLPSpec(integer(hf, "intermediate_size"))
    layers = tuple(
        LayerSpec(
            GroupedQuerySpec(
                window,
                bias,
                bias,
                interleaved=True,
                rope="none" if window == unrotated else "global",
            ),
            mlp,
            "shared",
        )
        for window in windows
    )
    return DecoderConfig(
        **common_fields(hf, theta=theta, epsilon="layer_norm_eps"),
        layers=layers,
        centered_norms=True,
        logit_scale=number(hf, "logit_scale"),
    )

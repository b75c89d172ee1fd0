"""The config.json of Granite; numbers are in tests/mpjax/checkpoint."""

from __future__ import annotations

import pytest

from mpjax.models import ConfigError, Granite

pytestmark = pytest.mark.any_version

# The config.json of Granite 3.3 2B, but for keys that say nothing about the computation.
HF = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}


def test_factors():
    config = Granite.config_from_hf(HF)
    assert config.layers[0].attention.scale == 0.015625  # type: ignore[attr-defined]
    assert config.logit_scale == 1 / 8
    # The residual stream is divided by residual_multiplier.
    assert config.embedding_scale == pytest.approx(12 / 0.22)
    assert config.rms_norm_eps == pytest.approx(1e-5 / 0.22**2)


def test_a_factor_must_be_positive():
    with pytest.raises(ConfigError, match="residual_multiplier is 0: expected a positive number"):
        Granite.config_from_hf(HF | {"residual_multiplier": 0})
    with pytest.raises(ConfigError, match="residual_multiplier is 1e-200: expected a positive num"):
        Granite.config_from_hf(HF | {"residual_multiplier": 1e-200})  # whose square is 0

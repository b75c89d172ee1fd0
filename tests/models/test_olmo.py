"""The config.json of OLMo 2; numbers are in tests/mpjax/checkpoint."""

from __future__ import annotations

import pytest

from mpjax.models import Olmo2

pytestmark = pytest.mark.any_version

HF = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
}


def test_norms_after_halves_and_over_all_heads():
    config = Olmo2.config_from_hf(HF)
    assert {layer.norms for layer in config.layers} == {"post"}
    arrays = {place.path: (place.name, place.shape) for place in Olmo2.array_places(config)}
    layer = "model.layers.1."
    assert arrays["layers.1.attention.query_norm.weight"][1] == (64,)
    assert arrays["layers.1.attention.key_norm.weight"][1] == (32,)
    assert "layers.1.attention_norm.weight" not in arrays
    post = arrays["layers.1.mlp_post_norm.weight"]
    assert post == (f"{layer}post_feedforward_layernorm.weight", (64,))
    # Without a norm before the products, no scales can move there.
    assert {fold.source for fold in config.layers[0].folds(config)} == {
        "attention.qkv",
        "mlp.gate_up",
    }

"""The config.json of Phi-3 and Phi-4; numbers are in tests/mpjax/checkpoint."""

from __future__ import annotations

import pytest

from mpjax.models import ConfigError, Phi3

pytestmark = pytest.mark.any_version

# The config.json of Phi-4-mini, but for the lists of factors, which are shorter.
HF = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def test_phi_4_mini():
    config = Phi3.config_from_hf(HF)
    assert (config.head_dim, config.rotary_dim) == (128, 96)
    assert config.windows == (262144,) * 32
    scaling = config.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("longrope", 32.0, 4096)
    assert scaling.attention_factor == pytest.approx(1.1902380714)
    assert (len(scaling.short_factors), scaling.long_factors[0]) == (48, 2.0)
    first = HF | {"rope_scaling": HF["rope_scaling"] | {"type": "su"}}
    assert Phi3.config_from_hf(first) == config


def test_the_original_context_has_a_logarithm():
    message = "rotary scaling: original_max_position_embeddings is 1: expected an integer from 2 on"
    with pytest.raises(ConfigError, match=message):
        Phi3.config_from_hf(HF | {"original_max_position_embeddings": 1})


def test_maps_that_the_file_holds_as_one():
    config = Phi3.config_from_hf(HF)
    places = {place.path: place for place in Phi3.linear_places(config)}
    qkv, gate_up = places["layers.3.attention.qkv"], places["layers.3.mlp.gate_up"]
    assert qkv.names == ("model.layers.3.self_attn.qkv_proj",)
    assert qkv.shapes == ((3072, 3072 + 2 * 1024),)
    assert (gate_up.names, gate_up.shapes) == (
        ("model.layers.3.mlp.gate_up_proj",),
        ((3072, 16384),),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"short_factor": [1.0] * 47}, "short_factor is .*expected a list of 48 numbers"),
        ({"long_factor": None}, "long_factor is None: expected a list of numbers"),
        ({"long_factor": [-1.0] * 48}, "long_factor is -1.0: expected a positive number"),
    ],
)
def test_factors_that_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        Phi3.config_from_hf(HF | {"rope_scaling": HF["rope_scaling"] | change})

"""The config.json of SmolLM3; numbers are in tests/mpjax/checkpoint."""

from __future__ import annotations

import pytest

from mpjax.models import ConfigError, SmolLM3

pytestmark = pytest.mark.any_version

HF = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "sliding_window": 16,
    "use_sliding_window": False,
}


def ropes(config):
    return [layer.attention.rope for layer in config.layers]


def test_every_fourth_layer_has_no_rotary_embedding():
    config = SmolLM3.config_from_hf(HF)
    assert ropes(config) == (["global"] * 3 + ["none"]) * 2
    assert (config.rope_theta, config.tie_word_embeddings) == (2e6, True)
    assert config.windows == (None,) * 8


def test_layers_are_listed():
    listed = {"no_rope_layers": [1, 0] * 4, "attention_bias": True, "mlp_bias": True}
    config = SmolLM3.config_from_hf(HF | listed)
    assert ropes(config) == ["global", "none"] * 4
    assert config.layers[0].attention.output_bias  # type: ignore[attr-defined]
    assert config.layers[0].mlp.bias  # type: ignore[attr-defined]
    windows = ["sliding_attention", "full_attention"] * 4
    config = SmolLM3.config_from_hf(HF | {"use_sliding_window": True, "layer_types": windows})
    assert config.windows == (16, None) * 4


def test_without_a_list_layers_without_a_rotation_have_the_window():
    used = HF | {"use_sliding_window": True}
    assert SmolLM3.config_from_hf(used).windows == (None, None, None, 16) * 2
    listed = SmolLM3.config_from_hf(used | {"no_rope_layers": [0, 1] * 4})
    assert listed.windows == (16, None) * 4
    windows = ["sliding_attention", "full_attention"] * 4
    with pytest.raises(
        ConfigError, match="use_sliding_window is False: expected true, since layer"
    ):
        SmolLM3.config_from_hf(HF | {"layer_types": windows})


@pytest.mark.parametrize("listed", [[1, 0], [2] * 8, "1" * 8])
def test_lists_that_are_refused(listed):
    with pytest.raises(ConfigError, match=r"no_rope_layers is .*: expected a list of 8 of 0 and 1"):
        SmolLM3.config_from_hf(HF | {"no_rope_layers": listed})

from __future__ import annotations

import pytest

from mpjax.models import ConfigError, Mistral, llama_layers

# Mistral 7B, as of version 0.1.
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def test_all_layers_have_the_window():
    config = Mistral.config_from_hf(MISTRAL | {"sliding_window": 1000})
    assert config.layers == llama_layers((1000,) * 32, 14336)
    assert (config.head_dim, config.stop_ids) == (128, (2,))


def test_null_means_no_window():
    assert Mistral.config_from_hf(MISTRAL | {"sliding_window": None}).windows == (None,) * 32


def test_a_file_without_the_key_means_4096():
    missing = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert Mistral.config_from_hf(missing).windows == (4096,) * 32


def test_some_layers_may_see_everything():
    kinds = ["sliding_attention", "full_attention"] * 16
    assert Mistral.config_from_hf(MISTRAL | {"layer_types": kinds}).windows == (4096, None) * 16


def test_the_window_is_a_number():
    with pytest.raises(ConfigError, match="sliding_window is '4096': expected a positive integer"):
        Mistral.config_from_hf(MISTRAL | {"sliding_window": "4096"})

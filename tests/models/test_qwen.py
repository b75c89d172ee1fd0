from __future__ import annotations

import pytest

from mpjax.models import ConfigError, Qwen2, Qwen3, llama_layers
from mpjax.models.presets import FILES

QWEN3_8B = FILES["qwen3-8b"]

# The config.json of Qwen2.5 0.5B.
QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_qwen3_may_have_biases():
    config = Qwen3.config_from_hf(QWEN3_8B | {"attention_bias": True})
    switches = dict.fromkeys(("qkv_bias", "output_bias", "qk_norm"), True)
    assert config.layers == llama_layers((None,) * 36, 12288, **switches)


def test_qwen2_has_biases_on_query_key_and_value_alone():
    config = Qwen2.config_from_hf(QWEN2_5)
    assert (config.head_dim, config.tie_word_embeddings) == (64, True)
    assert config.layers == llama_layers((None,) * 24, 4864, qkv_bias=True)


@pytest.mark.parametrize(("family", "hf", "layers"), [(Qwen2, QWEN2_5, 24), (Qwen3, QWEN3_8B, 36)])
def test_the_window_holds_from_a_layer_on_and_only_if_it_is_used(family, hf, layers):
    changes = {"sliding_window": 512, "max_window_layers": 20}
    assert family.config_from_hf(hf | changes).windows == (None,) * layers
    used = hf | changes | {"use_sliding_window": True}
    assert family.config_from_hf(used).windows == (None,) * 20 + (512,) * (layers - 20)
    kinds = ["full_attention"] * (layers - 1) + ["sliding_attention"]
    listed = used | {"layer_types": kinds}
    assert family.config_from_hf(listed).windows == (None,) * (layers - 1) + (512,)
    unused = hf | {"layer_types": kinds, "sliding_window": 512}
    assert family.config_from_hf(unused).windows == (None,) * layers


def test_a_file_without_max_window_layers_means_28():
    hf = {key: value for key, value in QWEN3_8B.items() if key != "max_window_layers"}
    config = Qwen3.config_from_hf(hf | {"use_sliding_window": True, "sliding_window": 512})
    assert config.windows == (None,) * 28 + (512,) * 8


def test_windows_that_are_used_are_numbers():
    unused = QWEN3_8B | {"sliding_window": "x", "max_window_layers": "y"}
    assert Qwen3.config_from_hf(unused).windows == (None,) * 36
    used = QWEN3_8B | {"use_sliding_window": True, "sliding_window": 4}
    for key in ("sliding_window", "max_window_layers"):
        with pytest.raises(ConfigError, match=f"{key} is 'x': expected a"):
            Qwen3.config_from_hf(used | {key: "x"})

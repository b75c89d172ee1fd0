from __future__ import annotations

from mpjax.models import Llama, RopeScaling, llama_layers, presets

# The config.json of Llama 3.1 8B Instruct, but for keys that say nothing about the computation.
LLAMA3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_llama_3_1_is_the_preset():
    config = Llama.config_from_hf(LLAMA3_1_8B)
    assert config == presets.LLAMA3_1_8B
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_biases_are_read():
    config = Llama.config_from_hf(LLAMA3_1_8B)
    assert config.layers == llama_layers((None,) * 32, 14336)
    config = Llama.config_from_hf(LLAMA3_1_8B | {"attention_bias": True, "mlp_bias": True})
    biases = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
    assert config.layers == llama_layers((None,) * 32, 14336, **biases)

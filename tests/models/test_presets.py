from __future__ import annotations

import math

import pytest

from mpjax.models import DecoderConfig, family, presets
from tests.models.test_gpt_oss import GPT_OSS
from tests.models.test_mixtral import MIXTRAL
from tests.models.test_qwen_moe import QWEN3 as QWEN3_30B_A3B

# Values of the published files that a decoder's computation depends on.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
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
LLAMA3_70B = LLAMA3_1_8B | {
    "eos_token_id": [128001, 128009],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "rope_scaling": None,
}

QWEN3_6 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attn_output_gate": True,
    "eos_token_id": 248046,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
}
QWEN3_6_MOE = QWEN3_6 | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}


def parameters(config: DecoderConfig) -> int:
    [decoder] = [d for d, known in presets.PUBLISHED.values() if known is config]
    maps = [shape for place in decoder.linear_places(config) for shape in place.shapes]
    return sum(math.prod(shape) for shape in maps) + 2 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        *((presets.QWEN3_8B, 8.19), (presets.LLAMA3_1_8B, 8.03), (presets.LLAMA3_70B, 70.55)),
        *((presets.QWEN3_30B_A3B, 30.52), (presets.MIXTRAL_8X7B, 46.70)),
        *((presets.GPT_OSS_20B, 20.91), (presets.QWEN3_6_27B, 26.89)),
        (presets.QWEN3_6_35B_A3B, 34.64),
    ],
)
def test_presets_have_the_published_number_of_parameters(config, billions):
    assert parameters(config) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("config", "file"),
    [
        *((presets.QWEN3_8B, QWEN3_8B), (presets.LLAMA3_1_8B, LLAMA3_1_8B)),
        *((presets.QWEN3_30B_A3B, QWEN3_30B_A3B), (presets.MIXTRAL_8X7B, MIXTRAL)),
        *((presets.GPT_OSS_20B, GPT_OSS), (presets.LLAMA3_70B, LLAMA3_70B)),
        *((presets.QWEN3_6_27B, QWEN3_6), (presets.QWEN3_6_35B_A3B, QWEN3_6_MOE)),
    ],
)
def test_presets_are_what_the_published_files_say(config, file):
    assert family(file).config_from_hf(file) == config
    assert hash(config) == hash(family(file).config_from_hf(file))  # static in `jit`


def test_models_have_names():
    assert presets.published("qwen3-8b") == (presets.Qwen3, presets.QWEN3_8B)
    with pytest.raises(ValueError, match=r"unknown shapes 'qwen': expected one of qwen3-8b, llama"):
        presets.published("qwen")

"""Configurations of published models, for benchmarks and examples without a checkpoint."""

from __future__ import annotations

from typing import Any

from mpjax.models.config import DecoderConfig
from mpjax.models.decoder import Decoder
from mpjax.models.registry import family

_QWEN3 = {
    **{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "eos_token_id": 151645},
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    **{"max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-06},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
    **{"max_window_layers": 36},
}
_LLAMA3 = {
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256},
    **{"eos_token_id": [128001, 128009], "hidden_size": 8192, "intermediate_size": 28672},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-05},
    **{"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    **{"attention_bias": False, "mlp_bias": False},
}
_QWEN3_6 = {
    **{"architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248320, "eos_token_id": 248046},
    **{"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64},
    **{"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    **{"max_position_embeddings": 262144, "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    **{"rms_norm_eps": 1e-06, "attn_output_gate": True, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
}

# Name in commands → the published config.json, as far as the computation depends on it.
FILES: dict[str, dict[str, Any]] = {
    "qwen3-8b": _QWEN3,
    "llama3.1-8b": _LLAMA3
    | {
        **{"eos_token_id": [128001, 128008, 128009], "hidden_size": 4096},
        **{"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        "max_position_embeddings": 131072,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    },
    "llama3-70b": _LLAMA3,
    "qwen3-30b-a3b": _QWEN3
    | {
        **{"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
        **{"mlp_only_layers": [], "num_hidden_layers": 48, "max_window_layers": 48},
        "num_key_value_heads": 4,
    },
    "mixtral-8x7b": {
        **{"architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "eos_token_id": 2},
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8},
        **{"num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1e6},
        **{"rms_norm_eps": 1e-05, "hidden_act": "silu", "sliding_window": None},
        **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    },
    "gpt-oss-20b": {
        **{"architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "eos_token_id": 200002},
        **{"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
        **{"layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128},
        **{"max_position_embeddings": 131072, "rope_theta": 150000, "rms_norm_eps": 1e-05},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
        **{"attention_bias": True, "hidden_act": "silu"},
        **{"tie_word_embeddings": False, "torch_dtype": "bfloat16"},
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3.6-27b": _QWEN3_6,
    "qwen3.6-35b-a3b": _QWEN3_6
    | {
        **{"architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048},
        **{"linear_num_value_heads": 32, "moe_intermediate_size": 512, "num_experts": 256},
        **{"num_experts_per_tok": 8, "shared_expert_intermediate_size": 512},
        **{"num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 40},
    },
}
# Name in commands → class and configuration of the model.
PUBLISHED: dict[str, tuple[type[Decoder], DecoderConfig]] = {
    name: (decoder, decoder.config_from_hf(file))
    for name, file in FILES.items()
    for decoder in [family(file)]
}
QWEN3_8B, LLAMA3_1_8B, LLAMA3_70B = (
    PUBLISHED[name][1] for name in ("qwen3-8b", "llama3.1-8b", "llama3-70b")
)


def published(name: str) -> tuple[type[Decoder], DecoderConfig]:
    """The class and the configuration of a model. Raises ValueError for an unknown name."""
    if name not in PUBLISHED:
        raise ValueError(f"unknown shapes {name!r:.80}: expected one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name]

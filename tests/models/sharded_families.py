"""Every family divided among devices against one: logits of some, and the shares joined again.

With the cases of sharded_decoders.py, it needs a process of its own with several devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.models.sharded_families`
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mpjax.models import Decoder
from mpjax.models.registry import FAMILIES
from tests.models import sharded_decoders
from tests.models.sharded_decoders import CASES, divide, require_same_arrays

VOCABULARY = 51  # which two devices don't divide
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
TWO_LAYERS = {"num_hidden_layers": 2}  # of families whose layers are of two kinds
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHORT_CONV = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
GRANITE_EXPERTS = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.1},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
}
SIGMOIDS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    **{"n_shared_experts": 1, "routed_scaling_factor": 1.5},
}
LATENT = {
    **{**SIGMOIDS, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24},
    **{"v_head_dim": 32, "q_lora_rank": 64, "num_attention_heads": 3, "num_key_value_heads": 3},
    **{"head_dim": None, **TWO_LAYERS, "first_k_dense_replace": 1},
}
# With three key heads, of which two devices have two and one.
DELTA = {**TWO_LAYERS, "full_attention_interval": 2, "linear_num_key_heads": 3}
DELTA |= {"linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
# The keys of a family's config.json beside COMMON.
CHANGES: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {**TWO_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2ForCausalLM": {**TWO_LAYERS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "Gemma3ForCausalLM": {
        **TWO_LAYERS,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "GemmaForCausalLM": {"tie_word_embeddings": True},
    "Gemma4ForCausalLM": {
        **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"tie_word_embeddings": True, "sliding_window": 12, "global_head_dim": 64},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2},
        **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        **{"moe_intermediate_size": 64, "hidden_size_per_layer_input": 16},
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "Gemma3nForCausalLM": {
        **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"tie_word_embeddings": True, "sliding_window": 12, "num_kv_shared_layers": 2},
        **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 48, "laurel_rank": 8},
        **{"activation_sparsity_pattern": [0.5, 0.0, 0.9, 0.0]},
    },
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 4.0,
    },
    "FalconH1ForCausalLM": {
        **{"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 8, "mamba_n_groups": 3},
        **{"mamba_rms_norm": True, "ssm_out_multiplier": 0.5, "key_multiplier": 0.7},
        "ssm_multipliers": [0.5, 0.8, 1.5, 1.2, 0.9],
    },
    "NemotronHForCausalLM": {
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 8},
        **{"n_routed_experts": 4, "moe_intermediate_size": 64},
        "moe_shared_expert_intermediate_size": 96,
    },
    "GraniteMoeHybridForCausalLM": {
        **{**TWO_LAYERS, "layer_types": ["mamba", "attention"], "mamba_n_heads": 6},
        **{"mamba_d_state": 8, "mamba_expand": 3, "num_local_experts": 4},
        "shared_intermediate_size": 96,
    },
    "Lfm2ForCausalLM": {**TWO_LAYERS, **SHORT_CONV, "conv_bias": True},
    "Lfm2MoeForCausalLM": {
        **{**TWO_LAYERS, **SHORT_CONV, "num_dense_layers": 1, "num_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 64},
    },
    "CohereForCausalLM": {"tie_word_embeddings": True, "logit_scale": 0.5, "layer_norm_eps": 1e-5},
    "Cohere2ForCausalLM": {
        **TWO_LAYERS,
        **{"tie_word_embeddings": True, "logit_scale": 0.5, "sliding_window": 12},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Cohere2MoeForCausalLM": {
        **{**TWO_LAYERS, "tie_word_embeddings": True, "logit_scale": 0.5, "layer_norm_eps": 1e-5},
        **{
            "sliding_window": 12,
            "first_k_dense_replace": 1,
            "num_experts": 4,
            "rms_norm_eps": None,
        },
        **{"num_experts_per_tok": 2, "num_shared_experts": 1, "expert_selection_fn": "sigmoid"},
    },
    "DeepseekV2ForCausalLM": {**LATENT, "q_lora_rank": None},
    "DeepseekV3ForCausalLM": {**LATENT, "n_group": 4, "topk_group": 2},
    "DeepseekV32ForCausalLM": LATENT,
    "Glm4MoeLiteForCausalLM": LATENT,
    "Mistral4ForCausalLM": LATENT,
    "Dots1ForCausalLM": {**SIGMOIDS, "n_group": 4, "topk_group": 2},
    "Ernie4_5_MoeForCausalLM": {
        **TWO_LAYERS,
        **{"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64},
    },
    "Exaone4ForCausalLM": {
        **TWO_LAYERS,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Glm4MoeForCausalLM": {**SIGMOIDS, **TWO_LAYERS, "use_qk_norm": True},
    "GraniteMoeForCausalLM": GRANITE_EXPERTS,
    "GraniteMoeSharedForCausalLM": {**GRANITE_EXPERTS, "shared_intermediate_size": 48},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2},
    "Ministral3ForCausalLM": {
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "mscale": 1.0},
            **{"original_max_position_embeddings": 16, "mscale_all_dim": 1.0},
            "llama_4_scaling_beta": 0.5,
        }
    },
    "OlmoHybridForCausalLM": {**DELTA, "layer_types": ["linear_attention", "full_attention"]},
    "PhimoeForCausalLM": {
        **{"num_local_experts": 4, "router_jitter_noise": 0.4, "lm_head_bias": True},
        **{"attention_bias": True, "sliding_window": 12},
    },
    "Llama4ForCausalLM": {
        **{**TWO_LAYERS, "no_rope_layer_interval": 2, "attention_chunk_size": 12},
        **{"floor_scale": 4, "attn_scale": 0.5, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"intermediate_size_mlp": 128, "moe_layers": [1]},
    },
    "KimiLinearForCausalLM": {
        **{**LATENT, "q_lora_rank": None, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_heads": 3, "linear_head_dim": 32},
    },
    "MuseGlimmerForCausalLM": {**TWO_LAYERS, "sliding_window": 12, "qk_scale_factor": 2.0},
    "MiniMaxM2ForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 16},
    "Olmo3ForCausalLM": {
        **TWO_LAYERS,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0},
            "original_max_position_embeddings": 64,
        },
    },
    "Starcoder2ForCausalLM": {"sliding_window": 12},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {**QWEN_EXPERTS, "shared_expert_intermediate_size": 96},
    "Qwen3MoeForCausalLM": QWEN_EXPERTS,
    "Qwen3NextForCausalLM": {**DELTA, **QWEN_EXPERTS, "shared_expert_intermediate_size": 96},
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": {**DELTA, **QWEN_EXPERTS, "shared_expert_intermediate_size": 96},
    "SmolLM3ForCausalLM": {**TWO_LAYERS, "no_rope_layer_interval": 2},
}
# Families whose calls have a part that no other has: experts with biases, sinks and windows; norms
# behind sublayers and capped logits; several streams and sparse gates; factors; norms over all
# heads; a shared MLP with a gate; an activation with learned numbers; both halves behind one norm;
# neighbours that rotate together, and corrected scores; Mamba2 with a norm over all heads, in
# groups beside attention, and beside experts without gates; short convolutions; the delta rule,
# with maps of one key head after another or of all, and a convolution in three parts; latents.
CALLED = (
    "GptOssForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "GraniteForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "NemotronHForCausalLM",
    "Lfm2ForCausalLM",
    "Olmo2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "ApertusForCausalLM",
    "Cohere2ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "OlmoHybridForCausalLM",
    "PhimoeForCausalLM",
    "Llama4ForCausalLM",
    "KimiLinearForCausalLM",
    "MuseGlimmerForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)


def keys(architecture: str) -> dict[str, Any]:
    """The config.json of a tiny model of a family."""
    return {"architectures": [architecture], **COMMON, **CHANGES.get(architecture, {})}


def build(architecture: str) -> Decoder:
    """A tiny model of a family, with strong random weights."""
    family = FAMILIES[architecture]
    config = family.config_from_hf(keys(architecture))
    model = nnx.eval_shape(lambda: family(config, nnx.Rngs(0)))
    rng = np.random.default_rng(0)

    def strong(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.standard_normal(x.shape)
        name = jax.tree_util.keystr(path)
        if len(x.shape) > 1 and "embedding" not in name:
            noise *= x.shape[-2 if "kernel" in name else -1] ** -0.5
        elif "norm" in name:
            noise = 1.0 + 0.3 * noise
        return jnp.asarray(noise.astype(x.dtype))

    nnx.update(model, jax.tree_util.tree_map_with_path(strong, nnx.state(model)))
    return model


def logits(model: Decoder) -> np.ndarray:
    """After each token of a prompt; with states of sequences after tokens of which few stay."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (2, 6)), jnp.int32)
    cache, counts = model.create_cache(2, 16, "KV16", 16), jnp.asarray([6, 6], jnp.int32)
    if model.config.keeps_sequences:
        after = model.step(tokens, counts, cache, tentative=True)[1]
        cache = model.settle(after, cache, jnp.asarray([3, 1]))
        return np.asarray(model.step(tokens, counts, cache, every_position=True)[0])
    return np.asarray(model.step(tokens, counts, cache, fresh=True, every_position=True)[0])


def check(architecture: str) -> None:
    model = build(architecture)
    # With a norm over all heads, also more devices than there are KV heads, or heads.
    for count in (2, 4, 8) if architecture == "Olmo2ForCausalLM" else (2,):
        divided = divide(model, count)
        require_same_arrays(model, divided.whole())
        if architecture not in CALLED:
            continue
        expected, found = logits(model), logits(divided)
        assert np.all(found[..., VOCABULARY:] == -np.inf)
        error = np.abs(found[..., :VOCABULARY] - expected).max() / np.abs(expected).max()
        assert error < 2e-4, (architecture, count, error)


if __name__ == "__main__":
    for case in CASES:
        sharded_decoders.check(*case)
    for name in FAMILIES:
        check(name)
    print(f"{len(CASES)} cases, {len(FAMILIES)} families")

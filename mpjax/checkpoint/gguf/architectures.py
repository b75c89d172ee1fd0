"""The supported GGUF architectures: conversion to config.json and to Hugging Face's tensor names.

Source: llama.cpp, gguf-py/gguf/constants.py, and convert_hf_to_gguf.py for the differences between
GGUF's and Hugging Face's tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf import (
    delta,
    dense,
    gemma,
    hybrids,
    kimi,
    known_keys,
    latent,
    mixtures,
    names,
    rotary,
)
from mpjax.checkpoint.gguf.architecture import Architecture
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.checkpoint.gguf.names import NAMES, TABLES, expert_names
from mpjax.errors import CheckpointError
from mpjax.models.config_json import MAXIMUM_LAYERS

# Keys that must equal head_dim.
OF_WHOLE_HEADS = (
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
LFM2_TABLES = TABLES | {"token_embd_norm": "model.embedding_norm"}
NEMOTRON = Architecture(
    *("NemotronHForCausalLM", "nemotron_h", hybrids.NEMOTRON_NAMES),
    arrays=hybrids.arrays("mixer", "mixer.gate.e_score_correction_bias"),
    tables={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    layers="backbone.layers",
    is_mixed=True,
    is_rotated=False,
    more=hybrids.nemotron_keys,
)
GRANITE_HYBRID = Architecture(
    *("GraniteMoeHybridForCausalLM", "granitemoehybrid", hybrids.GRANITE_NAMES),
    interleaved=True,
    arrays=hybrids.arrays("mamba"),
    is_mixed=True,
    more=hybrids.granite_keys,
    joins=True,
)
GEMMA_4 = Architecture(
    *("Gemma4ForCausalLM", "gemma4_text", gemma.GEMMA_4_NAMES),
    arrays=gemma.GEMMA_4_ARRAYS,
    tables=gemma.PER_LAYER_TABLES,
    is_uneven=True,
    more=gemma.gemma4,
)
QWEN_DELTA_MOE = Architecture(
    *("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", delta.EXPERT_NAMES),
    offset_norms=True,
    arrays=delta.ARRAYS,
    more=delta.expert_keys,
    delta="tiled",
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True, more=dense.biases),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": Architecture("GemmaForCausalLM", "gemma", offset_norms=True, more=dense.gemma),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", names.GEMMA_NAMES, offset_norms=True, more=dense.gemma
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", names.GEMMA_NAMES, offset_norms=True, more=dense.gemma
    ),
    "gemma3n": Architecture(
        *("Gemma3nForCausalLM", "gemma3n_text", gemma.GEMMA_3N_NAMES),
        arrays=gemma.GEMMA_3N_ARRAYS,
        tables=gemma.PER_LAYER_TABLES,
        is_uneven=True,
        more=gemma.gemma3n,
    ),
    "gemma4": GEMMA_4,
    "granite": Architecture("GraniteForCausalLM", "granite", interleaved=True, more=dense.granite),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", names.OLMO_NAMES, more=dense.olmo),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", names.PHI_NAMES, more=dense.phi3),
    "seed_oss": Architecture(
        "SeedOssForCausalLM", "seed_oss", names.SEED_NAMES, more=dense.seed_oss
    ),
    # Interleaved RoPE in Hugging Face's files, too: no reordering.
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", more=dense.ernie),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", names.HUNYUAN_NAMES, more=dense.biases
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", interleaved=True, more=dense.biases),
    "command-r": Architecture(
        *("CohereForCausalLM", "cohere", names.COHERE_NAMES),
        epsilon="layer_norm_eps",
        more=dense.cohere,
    ),
    "cohere2": Architecture(
        *("Cohere2ForCausalLM", "cohere2", names.COHERE_NAMES),
        epsilon="layer_norm_eps",
        more=dense.cohere,
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", names.OLMO_NAMES, more=dense.exaone4),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", names.GLM_NAMES, more=dense.glm4),
    "starcoder2": Architecture(
        *("Starcoder2ForCausalLM", "starcoder2", names.STARCODER_NAMES),
        epsilon="norm_epsilon",
        more=dense.starcoder2,
    ),
    "apertus": Architecture(
        *("ApertusForCausalLM", "apertus", names.APERTUS_NAMES),
        more=dense.apertus,
        numbers=dense.xielu,
    ),
    "mistral3": Architecture(
        *("Ministral3ForCausalLM", "ministral3"),
        interleaved=True,
        yarn_unit=1.0,
        grows=True,
        more=dense.mistral3,
    ),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", more=dense.qwen_text),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", more=dense.qwen_text),
    "lfm2": Architecture(
        *("Lfm2ForCausalLM", "lfm2", hybrids.LFM2_NAMES),
        tables=LFM2_TABLES,
        is_mixed=True,
        more=hybrids.lfm2_keys,
    ),
    "falcon-h1": Architecture(
        *("FalconH1ForCausalLM", "falcon_h1", hybrids.FALCON_NAMES),
        arrays=hybrids.arrays("mamba"),
        tables=TABLES | {"output_norm": "model.final_layernorm"},
        more=hybrids.falcon_keys,
    ),
    "nemotron_h": NEMOTRON,
    "granitehybrid": GRANITE_HYBRID,
    "qwen35": Architecture(
        *("Qwen3_5ForCausalLM", "qwen3_5_text", delta.DENSE_NAMES),
        offset_norms=True,
        arrays=delta.ARRAYS,
        more=delta.keys,
        delta="tiled",
    ),
}


GPT_OSS_NAMES = {**names.SEED_NAMES, **names.GPT_OSS_EXPERTS}
QWEN3_MOE = Architecture(
    *("Qwen3MoeForCausalLM", "qwen3_moe", {**NAMES, **names.QWEN_EXPERTS}),
    more=mixtures.qwen_keys,
)
# Architectures with experts. `llama` with experts is Mixtral.
MIXTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        *("MixtralForCausalLM", "mixtral", {**NAMES, **names.MIXTRAL_EXPERTS}),
        interleaved=True,
        more=mixtures.mixtral_keys,
    ),
    "qwen2moe": Architecture(
        *("Qwen2MoeForCausalLM", "qwen2_moe", {**NAMES, **names.QWEN_EXPERTS}),
        more=mixtures.qwen_keys,
    ),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": dataclasses.replace(QWEN3_MOE, more=mixtures.qwen_text_keys),
    "glm4moe": Architecture(
        *("Glm4MoeForCausalLM", "glm4_moe", {**names.SEED_NAMES, **expert_names()}),
        arrays=mixtures.correction("mlp.gate.e_score_correction_bias"),
        more=mixtures.glm_keys,
    ),
    "dots1": Architecture(
        *("Dots1ForCausalLM", "dots1", {**NAMES, **expert_names()}),
        arrays=mixtures.correction("mlp.gate.e_score_correction_bias"),
        more=mixtures.dots_keys,
    ),
    "ernie4_5-moe": Architecture(
        *("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {**NAMES, **expert_names()}),
        arrays=mixtures.correction("mlp.moe_statics.e_score_correction_bias"),
        more=mixtures.ernie_keys,
    ),
    "hunyuan-moe": Architecture(
        *("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
        names={**names.HUNYUAN_NAMES, **names.HUNYUAN_EXPERTS},
        more=mixtures.hunyuan_keys,
    ),
    "granitemoe": Architecture(
        *("GraniteMoeForCausalLM", "granitemoe", hybrids.GRANITE_MOE_NAMES),
        interleaved=True,
        more=mixtures.granite_keys,
        joins=True,
    ),
    "gpt-oss": Architecture(
        *("GptOssForCausalLM", "gpt_oss", GPT_OSS_NAMES),
        arrays={"attn_sinks.weight": "self_attn.sinks"},
        more=mixtures.gpt_oss_keys,
        joins=True,
        turns=True,
        alternates=True,
    ),
    "llama4": Architecture(
        *("Llama4ForCausalLM", "llama4_text", {**NAMES, **names.LLAMA4_EXPERTS}),
        more=mixtures.llama4_keys,
        joins=True,
        turns=True,
    ),
    "minimax-m2": Architecture(
        *("MiniMaxM2ForCausalLM", "minimax_m2", {**NAMES, **names.MIXTRAL_EXPERTS}),
        arrays=mixtures.correction("block_sparse_moe.e_score_correction_bias"),
        more=mixtures.minimax_keys,
    ),
    "gemma4": GEMMA_4,
    "phimoe": Architecture(
        *("PhimoeForCausalLM", "phimoe", {**NAMES, **names.MIXTRAL_EXPERTS}),
        more=mixtures.phi_keys,
    ),
    "kimi-linear": Architecture(
        *("KimiLinearForCausalLM", "kimi_linear", kimi.NAMES),
        arrays=kimi.ARRAYS,
        is_mixed=True,
        is_latent=True,
        more=kimi.keys,
    ),
    "deepseek2": Architecture(
        *("DeepseekV3ForCausalLM", "deepseek_v3", latent.LATENT_NAMES),
        arrays=mixtures.correction("mlp.gate.e_score_correction_bias"),
        is_latent=True,
        yarn_unit=10.0,
        more=latent.deepseek_keys,
    ),
    "mistral4": Architecture(
        *("Mistral4ForCausalLM", "mistral4", latent.LATENT_NAMES),
        is_latent=True,
        yarn_unit=10.0,
        grows=True,
        more=latent.mistral_keys,
    ),
    "lfm2moe": Architecture(
        *("Lfm2MoeForCausalLM", "lfm2_moe", hybrids.LFM2_MOE_NAMES),
        arrays=hybrids.arrays("mamba", "feed_forward.expert_bias"),
        tables=LFM2_TABLES,
        is_mixed=True,
        more=hybrids.lfm2_moe_keys,
    ),
    "nemotron_h_moe": NEMOTRON,
    "granitehybrid": dataclasses.replace(GRANITE_HYBRID, names=hybrids.GRANITE_MOE_NAMES),
    "qwen35moe": QWEN_DELTA_MOE,
    "qwen3next": dataclasses.replace(QWEN_DELTA_MOE, delta="joint"),
}


# Values of general.type and general.architecture of files that are no language models.
NO_MODELS: Mapping[str, str] = {
    **dict.fromkeys(
        ("mmproj", "clip"),
        "the encoder of a model's images or sounds: expected the file of its language model, which "
        "is usually in the same repository",
    ),
    "adapter": "an adapter: expected a model; take the adapter in PEFT's format, beside its base",
    "imatrix": "an importance matrix, for quantising: expected a model",
}


def of(metadata: Metadata) -> Architecture:
    """The architecture of a file. Raises CheckpointError for an unsupported one."""
    kind = metadata.text("general.type", "model")
    name = metadata.text("general.architecture")
    if (what := NO_MODELS.get(kind) or NO_MODELS.get(name)) is not None:
        raise CheckpointError(f"{metadata.path} is {what}")
    known = MIXTURES if metadata.whole(f"{name}.expert_count", 0) else ARCHITECTURES
    if name not in known:
        expected = ", ".join(dict.fromkeys([*ARCHITECTURES, *MIXTURES]))
        experts = " with experts" if known is MIXTURES else ""
        raise CheckpointError(
            f"{metadata.path}: general.architecture is {name!r:.80}{experts}: expected one of "
            f"{expected}, with experts {', '.join(MIXTURES)}"
        )
    return known[name]


def read_config(
    metadata: Metadata, tensors: Mapping[str, Tensor], factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Hugging Face's config.json of the model.

    factors: the file's tensors that are in `rotary.FACTORS`, by name. Raises CheckpointError.
    """
    architecture, name = of(metadata), metadata.text("general.architecture")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{metadata.path} has no tensor 'token_embd.weight' of two dimensions: it holds no "
            "language model"
        )
    heads, layers, drafts = (
        metadata.whole(f"{name}.{key}", *default)
        for key, *default in (
            ("attention.head_count",),
            ("block_count",),
            ("nextn_predict_layers", 0),
        )
    )
    _require_layers(metadata, layers, drafts)
    kind = "rms_" if architecture.epsilon == "rms_norm_eps" else ""
    epsilon = metadata.number(f"{name}.attention.layer_norm_{kind}epsilon")
    config = {
        "architectures": [architecture.hugging_face],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.whole(f"{name}.embedding_length"),
        "num_hidden_layers": layers - drafts,
        "intermediate_size": _one_for_all(
            metadata,
            architecture,
            "feed_forward_length",
            ... if architecture.delta is None or "ffn_up" in architecture.names else 0,
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": _one_for_all(
            metadata, architecture, "attention.head_count_kv", heads
        ),
        "max_position_embeddings": metadata.whole(f"{name}.context_length"),
        architecture.epsilon: epsilon,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    whole = metadata.whole(f"{name}.attention.key_length", config["hidden_size"] // max(heads, 1))
    config |= {"head_dim": whole} | rotary.read(metadata, architecture, factors)
    config |= architecture.more(metadata, tensors)
    if not architecture.is_latent and "global_head_dim" not in config:
        _require_whole_heads(metadata, architecture, config, whole)
    known_keys.require_known(metadata, name)
    return config


def _require_layers(metadata: Metadata, layers: int, drafts: int) -> None:
    """Raises CheckpointError for an invalid number of layers, or of those that predict ahead."""
    name = metadata.text("general.architecture")
    if not 0 < layers <= MAXIMUM_LAYERS:
        raise CheckpointError(
            f"{metadata.path}: {name}.block_count is {layers}: expected 1 to {MAXIMUM_LAYERS}"
        )
    if not 0 <= drafts < layers:
        raise CheckpointError(
            f"{metadata.path}: {name}.nextn_predict_layers is {drafts}: expected fewer than the "
            f"{layers} layers of {name}.block_count, which counts them"
        )


def _require_whole_heads(
    metadata: Metadata, architecture: Architecture, config: Mapping[str, Any], whole: int
) -> None:
    """Raises CheckpointError for a size of heads other than `whole`, the number of channels."""
    name = metadata.text("general.architecture")
    has_own_rotation = "partial_rotary_factor" in config or not architecture.is_rotated
    for key in OF_WHOLE_HEADS:
        if (found := metadata.whole(f"{name}.{key}", whole)) != whole and not (
            key == "rope.dimension_count" and has_own_rotation
        ):
            raise CheckpointError(
                f"{metadata.path}: {name}.{key} is {found}: expected {whole}, the channels of a "
                "head, which are the same everywhere in this architecture"
            )


def _one_for_all(
    metadata: Metadata, architecture: Architecture, key: str, default: Any = ...
) -> int:
    """The value of a key that must be equal in all layers."""
    name = metadata.text("general.architecture")
    count = metadata.whole(f"{name}.block_count")
    found = set(metadata.each(f"{name}.{key}", count, default))
    if architecture.is_mixed and len(found) > 1:
        found -= {0}
    if architecture.is_uneven:
        return min(found)
    if len(found) != 1:
        raise CheckpointError(
            f"{metadata.path}: {name}.{key} is {sorted(found)!r:.80}: expected one number for all "
            "layers"
        )
    return found.pop()

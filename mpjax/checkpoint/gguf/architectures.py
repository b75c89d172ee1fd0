"""The supported GGUF architectures: conversion to config.json and to Hugging Face's tensor names.

Source: llama.cpp, gguf-py/gguf/constants.py, and convert_hf_to_gguf.py for the differences between
GGUF's and Hugging Face's tensors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from mpjax.checkpoint.gguf import delta, hybrids, known_keys, mixtures, rotary
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

Change = Callable[[np.ndarray], np.ndarray]

# GGUF's module name, without `blk.<layer>.` → Hugging Face's.
TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A value of `general.architecture`.

    hugging_face, model_type: `architectures` and `model_type` of config.json.
    names: names of a layer's modules. interleaved: whether the rows of query and key maps are
        ordered for interleaved RoPE.
    offset_norms: whether norm weights are larger by 1 than in Hugging Face's files.
    arrays: full names of a layer's tensors that have no `.weight` in GGUF or Hugging Face.
    tables: names of modules outside layers. layers: the prefix of layers in Hugging Face's names.
    is_mixed: whether layers may have no KV heads, or no MLP.
    is_rotated: whether attention has RoPE; without it, rope.dimension_count isn't checked.
    more: a function from metadata and tensors to further keys of config.json.
    joins: whether gate and up projections are one map in Hugging Face's files.
    delta: of linear layers, how files order value heads: `tiled`, or `joint` for Hugging Face's
        order with rates and decays in one map; None for architectures without such layers.
    """

    hugging_face: str
    model_type: str
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: NAMES)
    interleaved: bool = False
    offset_norms: bool = False
    arrays: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, str] = dataclasses.field(default_factory=lambda: TABLES)
    layers: str = "model.layers"
    is_mixed: bool = False
    is_rotated: bool = True
    more: Callable[[Metadata, Mapping[str, Tensor]], dict[str, Any]] = lambda metadata, tensors: {}
    joins: bool = False
    delta: Literal["tiled", "joint"] | None = None

    def translate(self, name: str) -> str:
        """Translates a GGUF module name to Hugging Face's. Unknown names are returned unchanged.

        name: an expert's module has its number at the end, such as `blk.3.ffn_up_exps.7`.
        """
        if name == "output":
            return "lm_head"
        if name in self.tables:
            return self.tables[name]
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+?)(?:\.(\d+))?", name)
        own = None if match is None else self.names.get(match[2])
        if match is None or own is None or ("{expert}" in own) != (match[3] is not None):
            return name
        return f"{self.layers}.{match[1]}.{own.format(expert=match[3])}"

    def array(self, name: str) -> str | None:
        """Hugging Face's name of a tensor in `arrays`; None for other tensors."""
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        own = None if match is None else self.arrays.get(match[2])
        return None if match is None or own is None else f"{self.layers}.{match[1]}.{own}"

    def change(self, name: str, config: Mapping[str, Any]) -> Change | None:
        """The conversion of a module's values to Hugging Face's; None if they are equal.

        name: GGUF's. The function takes and returns an array whose first axis is rows.
        """
        kind = name.split(".", 2)[-1]
        if kind == "ssm_a":
            order = delta.change(kind, config) if self.delta == "tiled" else None
            return lambda rates: hybrids.log_rates(rates if order is None else order(rates))
        if self.delta == "tiled" and (order := delta.change(kind, config)):
            return order
        if self.delta == "joint" and kind in ("ssm_beta", "ssm_alpha"):
            heads, number = delta.Heads.of(config), int(kind == "ssm_alpha")
            return lambda rows: heads.half(rows, number)
        if self.interleaved and kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            return lambda rows: _separate(rows, heads)
        if self.offset_norms and kind.endswith("norm") and kind != "ssm_norm":
            return lambda weight: weight - np.float32(1)
        return None


def _separate(rows: np.ndarray, heads: int) -> np.ndarray:
    """Moves the even rows of each head before the odd ones."""
    if rows.shape[0] % (2 * heads):  # an invalid shape, which `make_plan` refuses
        return rows
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(np.swapaxes(pairs, 1, 2)).reshape(rows.shape)


POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA_NAMES = {**NAMES, **POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
WITHOUT_PRE_NORMS = {"attn_norm", "ffn_norm"}
OLMO_NAMES = {k: v for k, v in {**NAMES, **POST_NORMS}.items() if k not in WITHOUT_PRE_NORMS}
PHI_NAMES = {
    **{k: v for k, v in NAMES.items() if k not in ("attn_q", "attn_k", "attn_v", "ffn_gate")},
    **{"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
# Keys that must equal head_dim.
OF_WHOLE_HEADS = (
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
# Number of layers of Gemma's 27B models, whose scores aren't scaled by 1 / √head_dim.
GEMMA_27B = {"gemma2": 46, "gemma3": 62}


def _gemma(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    name = metadata.text("general.architecture")
    heads, hidden = (
        metadata.whole(f"{name}.{key}") for key in ("attention.head_count", "embedding_length")
    )
    size = metadata.whole(f"{name}.attention.key_length", hidden // max(heads, 1))
    if metadata.whole(f"{name}.block_count") == GEMMA_27B.get(name):
        size = hidden / max(heads, 1)
    found: dict[str, Any] = {"query_pre_attn_scalar": size}
    if name == "gemma":
        return {}
    optional = {
        "sliding_window": metadata.whole(
            f"{name}.attention.sliding_window", 0 if name == "gemma3" else None
        ),
        "final_logit_softcapping": metadata.number(f"{name}.final_logit_softcapping", None),
    }
    if name == "gemma3":
        theta = metadata.number(f"{name}.rope.freq_base_swa", 10000.0)
        every = metadata.whole(f"{name}.attention.sliding_window_pattern", 6)
        found |= {"rope_local_base_freq": theta, "sliding_window_pattern": every}
    else:
        optional["attn_logit_softcapping"] = metadata.number(f"{name}.attn_logit_softcapping", None)
    # 0 means no window or cap, which is null in config.json.
    return found | {key: value or None for key, value in optional.items() if value is not None}


def _granite(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    if not metadata.flag("granite.rope.scaling.finetuned", True):
        raise CheckpointError(
            f"{metadata.path}: granite.rope.scaling.finetuned is false, by which llama.cpp knows a "
            "Granite without a rotary embedding: expected true"
        )
    return _biases(metadata, tensors) | _multipliers(metadata)


def _multipliers(metadata: Metadata) -> dict[str, Any]:
    name = metadata.text("general.architecture")
    keys = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {key: metadata.number(f"{name}.{written}") for key, written in keys.items()}


def _granite_hybrid(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return hybrids.granite_keys(metadata, tensors) | _multipliers(metadata)


def _phi3(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    heads = metadata.whole("phi3.attention.head_count")
    whole = metadata.whole("phi3.embedding_length") // max(heads, 1)
    rotated = metadata.whole("phi3.rope.dimension_count", whole)
    if rotated != whole:
        found["partial_rotary_factor"] = rotated / max(whole, 1)
    if (window := metadata.whole("phi3.attention.sliding_window", 0)) > 0:
        found["sliding_window"] = window
    return found


def _biases(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _seed_oss(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return _biases(metadata, tensors) | {"attention_out_bias": "blk.0.attn_output.bias" in tensors}


def _ernie(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in tensors}


# Seed-OSS names the norm before the MLP `post_attention_norm`.
SEED_NAMES = {
    **{key: name for key, name in NAMES.items() if key != "ffn_norm"},
    "post_attention_norm": "post_attention_layernorm",
}
HUNYUAN_NAMES = {
    **NAMES,
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
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
    more=_granite_hybrid,
    joins=True,
)
QWEN_DELTA_MOE = Architecture(
    *("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", delta.EXPERT_NAMES),
    offset_norms=True,
    arrays=delta.ARRAYS,
    more=delta.expert_keys,
    delta="tiled",
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaved=True, more=_biases),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": Architecture("GemmaForCausalLM", "gemma", offset_norms=True, more=_gemma),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", GEMMA_NAMES, offset_norms=True, more=_gemma
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", GEMMA_NAMES, offset_norms=True, more=_gemma
    ),
    "granite": Architecture("GraniteForCausalLM", "granite", interleaved=True, more=_granite),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", OLMO_NAMES),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", PHI_NAMES, more=_phi3),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss", SEED_NAMES, more=_seed_oss),
    # Interleaved RoPE in Hugging Face's files, too: no reordering.
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", more=_ernie),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", HUNYUAN_NAMES, more=_biases
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", interleaved=True, more=_biases),
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


# Architectures with experts. `llama` with experts is Mixtral.
MIXTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        *("MixtralForCausalLM", "mixtral", {**NAMES, **mixtures.MIXTRAL_NAMES}),
        interleaved=True,
        more=mixtures.mixtral_keys,
    ),
    "qwen2moe": Architecture(
        *("Qwen2MoeForCausalLM", "qwen2_moe", {**NAMES, **mixtures.QWEN_NAMES}),
        more=mixtures.qwen_keys,
    ),
    "qwen3moe": Architecture(
        *("Qwen3MoeForCausalLM", "qwen3_moe", {**NAMES, **mixtures.QWEN_NAMES}),
        more=mixtures.qwen_keys,
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


def of(metadata: Metadata) -> Architecture:
    """The architecture of a file. Raises CheckpointError for an unsupported one."""
    name = metadata.text("general.architecture")
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
    heads, layers = (
        metadata.whole(f"{name}.{key}") for key in ("attention.head_count", "block_count")
    )
    config = {
        "architectures": [architecture.hugging_face],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.whole(f"{name}.embedding_length"),
        "num_hidden_layers": layers,
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
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    whole = metadata.whole(f"{name}.attention.key_length", config["hidden_size"] // max(heads, 1))
    config |= {"head_dim": whole} | rotary.read(metadata, name, factors)
    config |= architecture.more(metadata, tensors)
    has_own_rotation = "partial_rotary_factor" in config or not architecture.is_rotated
    for key in OF_WHOLE_HEADS:
        if (found := metadata.whole(f"{name}.{key}", whole)) != whole and not (
            key == "rope.dimension_count" and has_own_rotation
        ):
            raise CheckpointError(
                f"{metadata.path}: {name}.{key} is {found}: expected {whole}, the channels of a "
                "head, which are the same everywhere in this architecture"
            )
    known_keys.require_known(metadata, name)
    return config


def _one_for_all(
    metadata: Metadata, architecture: Architecture, key: str, default: Any = ...
) -> int:
    """The value of a key that must be equal in all layers."""
    name = metadata.text("general.architecture")
    count = metadata.whole(f"{name}.block_count")
    found = set(metadata.each(f"{name}.{key}", count, default))
    if architecture.is_mixed and len(found) > 1:
        found -= {0}
    if len(found) != 1:
        raise CheckpointError(
            f"{metadata.path}: {name}.{key} is {sorted(found)!r:.80}: expected one number for all "
            "layers"
        )
    return found.pop()

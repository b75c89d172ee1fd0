"""The architectures of GGUF files that are read: their config.json, and their tensors' names.

Source: llama.cpp, gguf-py/gguf/constants.py, and convert_hf_to_gguf.py, which says how the tensors
differ from those of Hugging Face's files.
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

# Names in GGUF's files, without `blk.<layer>.`, and in Hugging Face's.
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

    hugging_face: the architecture in config.json. model_type: also there.
    names: of the tensors of a layer. interleaved: whether the rows of the query and key maps are
        ordered for a rotation of neighbouring channels.
    offset_norms: whether the weights of norms are larger by 1 than in Hugging Face's files.
    arrays: names of whole tensors of a layer, of those without `.weight` in one of the files.
    tables: names of what is in no layer. layers: what those of layers begin with.
    is_mixed: whether layers may have no KV heads, or no MLP.
    is_rotated: whether attention has a rotary embedding: without one, files may have any number of
        rotated channels.
    more: further keys of config.json, from the metadata and the names of the tensors.
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
    delta: Literal["tiled", "joint"] | None = None

    def translate(self, name: str) -> str:
        """The name of a module in Hugging Face's files; its own for one that is unknown.

        Modules of experts, and no others, have the expert's number after their name.
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
        """The name of a tensor of `arrays` in Hugging Face's files; None for others."""
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        own = None if match is None else self.arrays.get(match[2])
        return None if match is None or own is None else f"{self.layers}.{match[1]}.{own}"

    def change(self, name: str, config: Mapping[str, Any]) -> Change | None:
        """How the numbers of a module differ from Hugging Face's; None where they don't.

        name: in the GGUF file. The function takes and returns an array whose first axis is rows.
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
    """Moves each head's even rows before its odd ones."""
    if rows.shape[0] % (2 * heads):  # `make_plan` refuses such a tensor
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
# Numbers of channels that are those of a head.
OF_WHOLE_HEADS = (
    *("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"),
    *("rope.dimension_count", "rope.dimension_count_swa"),
)
# The layers of Gemma's 27B models, whose scores are not scaled by 1 / √(head dim).
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
    # 0 is no window and no cap, which config.json has null for.
    return found | {key: value or None for key, value in optional.items() if value is not None}


def _granite(metadata: Metadata, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    if not metadata.flag("granite.rope.scaling.finetuned", True):
        raise CheckpointError(
            f"{metadata.path}: granite.rope.scaling.finetuned is false, by which llama.cpp knows a "
            "Granite without a rotary embedding: expected true"
        )
    return _biases(metadata, tensors) | {
        key: metadata.number(f"granite.{written}") for key, written in keys.items()
    }


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


# By whose names the norm before the MLP is one after attention.
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
    # Hugging Face's files have neighbours together, too.
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
    "qwen35": Architecture(
        *("Qwen3_5ForCausalLM", "qwen3_5_text", delta.DENSE_NAMES),
        offset_norms=True,
        arrays=delta.ARRAYS,
        more=delta.keys,
        delta="tiled",
    ),
}


# Architectures with experts. A file whose architecture is `llama` may have experts, too.
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
    "qwen35moe": QWEN_DELTA_MOE,
    "qwen3next": dataclasses.replace(QWEN_DELTA_MOE, delta="joint"),
}


def of(metadata: Metadata) -> Architecture:
    """The architecture of a file. Raises CheckpointError for one that is not read."""
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
    """The config.json of Hugging Face's checkpoint of the model.

    factors: tensors of `rotary.FACTORS` that the file has, by name. Raises CheckpointError.
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
    """A number that is the same in all layers which have it."""
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

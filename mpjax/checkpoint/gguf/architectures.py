"""The architectures of GGUF files that are read: their config.json, and their tensors' names.

Source: llama.cpp, gguf-py/gguf/constants.py, and convert_hf_to_gguf.py, which says how the tensors
differ from those of Hugging Face's files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpjax.checkpoint.gguf import known_keys, mixtures, rotary
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError

Change = Callable[[np.ndarray], np.ndarray]

# Names in GGUF's files, without `blk.<layer>.`, and in Hugging Face's.
TABLES = {"token_embd": "embed_tokens", "output_norm": "norm"}
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
    more: further keys of config.json, from the metadata and the names of the tensors.
    """

    hugging_face: str
    model_type: str
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: NAMES)
    interleaved: bool = False
    offset_norms: bool = False
    more: Callable[[Metadata, Mapping[str, Tensor]], dict[str, Any]] = lambda metadata, tensors: {}

    def translate(self, name: str) -> str:
        """The name of a module in Hugging Face's files; its own for one that is unknown.

        Modules of experts, and no others, have the expert's number after their name.
        """
        if name == "output":
            return "lm_head"
        if name in TABLES:
            return f"model.{TABLES[name]}"
        match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?", name)
        own = None if match is None else self.names.get(match[2])
        if match is None or own is None or ("{expert}" in own) != (match[3] is not None):
            return name
        return f"model.layers.{match[1]}.{own.format(expert=match[3])}"

    def change(self, name: str, config: Mapping[str, Any]) -> Change | None:
        """How the numbers of a module differ from Hugging Face's; None where they don't.

        name: in the GGUF file. The function takes and returns an array whose first axis is rows.
        """
        kind = name.rpartition(".")[2]
        if self.interleaved and kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            return lambda rows: _separate(rows, heads)
        if self.offset_norms and kind.endswith("norm"):
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
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", interleaved=True, more=_biases),
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
    if metadata.whole("split.count", 1) > 1:
        raise CheckpointError(
            f"{metadata.path} is one of {metadata.whole('split.count')} parts of a model: join "
            "them into one file with `llama-gguf-split --merge`"
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
    heads = metadata.whole(f"{name}.attention.head_count")
    config = {
        "architectures": [architecture.hugging_face],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.whole(f"{name}.embedding_length"),
        "num_hidden_layers": metadata.whole(f"{name}.block_count"),
        "intermediate_size": metadata.whole(f"{name}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole(f"{name}.attention.head_count_kv", heads),
        "max_position_embeddings": metadata.whole(f"{name}.context_length"),
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    whole = metadata.whole(f"{name}.attention.key_length", config["hidden_size"] // max(heads, 1))
    config |= {"head_dim": whole} | rotary.read(metadata, name, factors)
    config |= architecture.more(metadata, tensors)
    for key in OF_WHOLE_HEADS:
        if (found := metadata.whole(f"{name}.{key}", whole)) != whole and (
            key != "rope.dimension_count" or "partial_rotary_factor" not in config
        ):
            raise CheckpointError(
                f"{metadata.path}: {name}.{key} is {found}: expected {whole}, the channels of a "
                "head, which are the same everywhere in this architecture"
            )
    known_keys.require_known(metadata, name)
    return config

"""The text model of a multimodal checkpoint: its config.json and its tensors.

Such a config.json has the keys of the text model in `text_config`. Older files name the text
model's tensors `language_model.model.…` and `language_model.lm_head.…`, newer ones
`model.language_model.…`. The vision encoder's tensors are left out. Source: transformers,
models/gemma3, models/mistral3, models/qwen2_vl and models/qwen3_vl.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpjax.checkpoint.safetensors import Checkpoint
from mpjax.errors import CheckpointError


class TextModel(NamedTuple):
    """The architecture of a text model, its `model_type`, and defaults of missing keys."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]


_QWEN_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
# Architecture of the multimodal checkpoint → its possible text models, the default first. The
# defaults of missing keys are those of transformers' config classes.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": (
        TextModel(
            *("Gemma3ForCausalLM", "gemma3_text"),
            {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
        ),
    ),
    "Gemma3nForConditionalGeneration": (
        TextModel(
            *("Gemma3nForCausalLM", "gemma3n_text"),
            {"vocab_size": 262400, "num_attention_heads": 8},
        ),
    ),
    "Llama4ForConditionalGeneration": (TextModel("Llama4ForCausalLM", "llama4_text", {}),),
    "Gemma4ForConditionalGeneration": (
        TextModel(
            *("Gemma4ForCausalLM", "gemma4_text"),
            {"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4},
        ),
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        TextModel(
            *("Gemma4ForCausalLM", "gemma4_unified_text"),
            {
                **{"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4},
                **{"sliding_window": 1024, "max_position_embeddings": 262144},
                "hidden_size_per_layer_input": 0,
            },
        ),
    ),
    "Mistral3ForConditionalGeneration": (
        TextModel("MistralForCausalLM", "mistral", {}),
        TextModel("Ministral3ForCausalLM", "ministral3", {}),
        TextModel("Mistral4ForCausalLM", "mistral4", {}),
    ),
    "MuseGlimmerForConditionalGeneration": (
        TextModel("MuseGlimmerForCausalLM", "muse_glimmer_text", {}),
    ),
    "Qwen2VLForConditionalGeneration": (
        TextModel("Qwen2ForCausalLM", "qwen2_vl_text", _QWEN_VL | {"num_key_value_heads": 8}),
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        TextModel("Qwen2ForCausalLM", "qwen2_5_vl_text", _QWEN_VL | {"num_key_value_heads": 8}),
    ),
    "Qwen3VLForConditionalGeneration": (
        TextModel(
            *("Qwen3ForCausalLM", "qwen3_vl_text"),
            {"max_position_embeddings": 128000, "rope_theta": 5e5},
        ),
    ),
    "Qwen3_5ForConditionalGeneration": (TextModel("Qwen3_5ForCausalLM", "qwen3_5_text", {}),),
    "Qwen3_5MoeForConditionalGeneration": (
        TextModel("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {}),
    ),
}
# Models whose older files have the text model's keys at the top level.
FLAT = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
}
ROTARY = ("rope_scaling", "rope_parameters")
# Top-level keys that override the text model's, since writers keep these up to date.
OF_THE_WHOLE = (
    *("torch_dtype", "dtype", "eos_token_id", "quantization_config"),
    "tie_word_embeddings",
)
_NAME = re.compile(r"language_model\.(model\.|lm_head\.)|model\.language_model\.")
_OTHERS = "vision_[a-z]+|multi_modal_projector|visual|audio_tower|embed_(vision|audio)"
_OF_IMAGES = re.compile(rf"(model\.)?({_OTHERS})\.")  # and of sounds
PATTERNS = (_NAME, _OF_IMAGES)


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's config.json; other models' are returned unchanged.

    Raises CheckpointError for an unsupported `model_type` of the text model.
    """
    names = hf.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = TEXT_MODELS.get(name) if isinstance(name, str) else None
    if known is None or not isinstance(name, str):
        return dict(hf)
    text = hf.get("text_config")
    if text is None and (kind := FLAT.get(name)) and hf.get("model_type", kind) == kind:
        text = {**hf, "model_type": known[0].model_type}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {text!r:.80}: expected an object")
    kind = text.get("model_type", known[0].model_type)
    model = next((each for each in known if each.model_type == kind), None)
    if model is None:
        expected = " or ".join(repr(each.model_type) for each in known)
        raise CheckpointError(
            f"config.json: text_config has the model_type {kind!r:.80}: expected {expected}, the "
            f"text model of {name} that is supported"
        )
    text = {**text, **{key: _of_text(text[key]) for key in ROTARY if key in text}}
    whole = {key: hf[key] for key in OF_THE_WHOLE if hf.get(key) is not None}
    objects = [text, *(text[key] for key in ROTARY if isinstance(text.get(key), Mapping))]
    given = {key for each in objects for key, value in each.items() if value is not None}
    lacking = {key: value for key, value in model.defaults.items() if key not in given}
    return {**text, **lacking, **whole, "architectures": [model.architecture]}


def _of_text(rotary: Any) -> Any:
    """A RoPE object for text only, where `mrope` is equal to default RoPE.

    For images, `mrope` has three positions, one for each section of a head's channels.
    """
    if not isinstance(rotary, Mapping):
        return rotary
    kinds = {key: "default" for key in ("type", "rope_type") if rotary.get(key) == "mrope"}
    return {**rotary, **kinds}


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with only the text model's tensors, under a text model's names."""
    if not any(pattern.match(name) for name in checkpoint.tensors for pattern in PATTERNS):
        return checkpoint
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if not _OF_IMAGES.match(name):
            own = own_name(name)
            tensors[own] = dataclasses.replace(info, name=own)
    return dataclasses.replace(checkpoint, tensors=types.MappingProxyType(tensors))


def own_name(name: str) -> str:
    """The text model's name of a tensor or module of a multimodal checkpoint."""
    return _NAME.sub(lambda match: match[1] or "model.", name, count=1)


def written_names(name: str) -> tuple[str, ...]:
    """The names that a text model's module may have in config.json; see `text_tensors`."""
    inner = name.removeprefix("model.")
    return name, f"language_model.{name}", f"model.language_model.{inner}"


def matches(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a pattern of config.json matches the beginning of a module's name.

    A pattern with `language_model` is of a multimodal checkpoint, so it is also matched against the
    names in such files.
    """
    names = written_names(name) if "language_model" in pattern.pattern else (name,)
    return any(map(pattern.match, names))

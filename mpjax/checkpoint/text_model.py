"""The text model of a checkpoint that also reads images: its config.json and its tensors.

Such a config.json has the keys of the text model in `text_config`. Older files name the text
model's tensors `language_model.model.…` and `language_model.lm_head.…`, newer ones
`model.language_model.…`. The tensors that read images are left out. Source: transformers,
models/gemma3 and models/mistral3.
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
    """The architecture of a text model, its `model_type`, and keys that files may leave out."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]


# By the architecture of the whole. The defaults are those of Hugging Face's classes.
TEXT_MODELS = {
    "Gemma3ForConditionalGeneration": TextModel(
        *("Gemma3ForCausalLM", "gemma3_text"),
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "Mistral3ForConditionalGeneration": TextModel("MistralForCausalLM", "mistral", {}),
}
# Keys of the whole that count, whatever the text model has, since writers keep them up to date.
OF_THE_WHOLE = (
    *("torch_dtype", "dtype", "eos_token_id", "quantization_config"),
    "tie_word_embeddings",
)
_NAME = re.compile(r"language_model\.(model\.|lm_head\.)|model\.language_model\.")
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the text model; that of any other model as it is.

    Raises CheckpointError for a text model of another kind.
    """
    names = hf.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = TEXT_MODELS.get(name) if isinstance(name, str) else None
    if known is None:
        return dict(hf)
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {text!r:.80}: expected an object")
    if (found := text.get("model_type", known.model_type)) != known.model_type:
        raise CheckpointError(
            f"config.json: text_config has the model_type {found!r:.80}: expected "
            f"{known.model_type!r}, the text model of {name} that is supported"
        )
    whole = {key: hf[key] for key in OF_THE_WHOLE if hf.get(key) is not None}
    lacking = {key: value for key, value in known.defaults.items() if text.get(key) is None}
    return {**text, **lacking, **whole, "architectures": [known.architecture]}


def text_tensors(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the text model's tensors alone, as a text model's files name them."""
    if not any(_NAME.match(name) for name in checkpoint.tensors):
        return checkpoint
    tensors = {}
    for name, info in checkpoint.tensors.items():
        if not _OF_IMAGES.match(name):
            own = _NAME.sub(lambda match: match[1] or "model.", name, count=1)
            tensors[own] = dataclasses.replace(info, name=own)
    return dataclasses.replace(checkpoint, tensors=types.MappingProxyType(tensors))


def written_names(name: str) -> tuple[str, ...]:
    """The names that a text model's module may have in config.json: see `text_tensors`."""
    inner = name.removeprefix("model.")
    return name, f"language_model.{name}", f"model.language_model.{inner}"


def matches(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a pattern of config.json matches a text model's module from its begin.

    A pattern with `language_model` is of a checkpoint that also reads images: it is compared with
    the names in such files, too.
    """
    names = written_names(name) if "language_model" in pattern.pattern else (name,)
    return any(map(pattern.match, names))

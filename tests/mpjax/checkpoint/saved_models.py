"""Small models to save, and the comparison of two of them bit by bit."""

from __future__ import annotations

import json
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

from mpjax.checkpoint import huggingface
from mpjax.language_model import LanguageModel
from mpjax.precision import Precision
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    GPTQ,
    SQUARE,
    linear_shapes,
    pack_random,
    random_tensors,
    write_checkpoint,
)


def write_tokenizer(folder):
    vocabulary = {"<s>": 0, "a": 1, "</s>": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ bos_token }}")


def as_published(folder):
    """Divides the convolutions of queries, keys and values as published files do.

    transformers reads them from three tensors of any sizes, and writes three equal ones.
    """
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{each}_conv1d") for each in "qkv"]
        taps = np.concatenate([tensors[each] for each in names])
        sizes = [len(tensors[each.replace("conv1d", "proj")]) for each in names]
        parts = np.split(taps, np.cumsum(sizes)[:-1])
        tensors |= {each: part.copy() for each, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors")


def load(folder, precision="A16KV16", dtype=None):
    precision = Precision.parse(precision)
    model = huggingface.load(folder, precision=precision, dtype=dtype)
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
    return LanguageModel(model, tokenizer, precision.kv, folder)


def plain(folder, rng, name="llama", **changes):
    hf = CONFIGS[name] | changes
    return write_checkpoint(folder, hf, random_tensors(hf, rng, ml_dtypes.bfloat16))


def mixed(folder, rng):
    """Packed, plain and permuted linear maps in one checkpoint, some of them fused."""
    hf = CONFIGS["qwen2"] | SQUARE | {"quantization_config": GPTQ | {"desc_act": True}}
    tensors = random_tensors(hf, rng, np.float16)
    for name, (channels, _) in linear_shapes(hf).items():
        if name not in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
            order = np.arange(channels) // 32
            order = rng.permutation(order) if "layers.0" in name else order
            pack_random(tensors, hf, name, rng, order)
    return write_checkpoint(folder, hf, tensors)


def require_same_bits(first: LanguageModel, second: LanguageModel):
    assert nnx.graphdef(first.model) == nnx.graphdef(second.model)
    flat: list[Any] = [jax.tree.flatten(nnx.state(lm.model)) for lm in (first, second)]
    (one, structure), (two, other_structure) = flat
    assert structure == other_structure
    for a, b in zip(one, two, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert first.config == second.config
    assert type(first.model) is type(second.model)
    assert (first.precision, first.kv_format) == (second.precision, second.kv_format)


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))

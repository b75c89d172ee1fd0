"""Writes checkpoints with random weights in the shapes of published models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import mpjax
from mpjax.bench.random_model import random_model
from mpjax.models import DecoderConfig
from mpjax.models.registry import FAMILIES
from mpjax.precision import Precision


def qwen3_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a Qwen3 model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": config.num_layers,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": list(config.stop_ids),
    }


def write(source: Path, config: Mapping[str, Any], precision: str, format: str) -> Path:
    """Exports random weights in a precision and format; returns the checkpoint's folder.

    config: the config.json, which is written into the folder `source` with the bundled tokenizer.
    The checkpoint's folder is beside `source`. The weights are made on the host, so that the
    device's memory is still empty when a benchmark loads them.
    """
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mpjax.bundled_model() / file, source / file)
    chosen, decoder = Precision.parse(precision), FAMILIES[config["architectures"][0]]
    folder = source.with_name(f"{source.name}-{format}")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = random_model(decoder, decoder.config_from_hf(config), chosen.weights)
        mpjax.export(mpjax.LanguageModel(model, None, chosen.kv, source), folder, format=format)
    return folder

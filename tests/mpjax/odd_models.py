"""Models whose numbers stop being finite, for tests of what is said then."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from tests.mpjax.checkpoint.write_checkpoint import random_tensors, write_checkpoint


def write_overflowing_model(folder: Path, like: Path, config: dict) -> Path:
    """A checkpoint in float16 whose first MLP goes beyond 65504, whatever it reads.

    like: a folder with the tokenizer's files. The MLP's output is small again, so that types
    with a larger range lose nothing.
    """
    config = config | {"torch_dtype": "float16"}
    tensors = random_tensors(config, np.random.default_rng(5))
    for name, tensor in tensors.items():
        tensors[name] = np.ones_like(tensor) if "norm" in name else tensor * np.float32(0.25)
        if "layers.0.mlp" in name:
            tensors[name] *= np.float32(1e-4 if "down_proj" in name else 300)
    write_checkpoint(folder, config, tensors)
    for path in like.glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    return folder


def with_damaged_token(lm: mpjax.LanguageModel, token: int) -> mpjax.LanguageModel:
    """The model with NaN in the embedding of a token: what follows it is NaN."""
    model = nnx.clone(lm.model)
    model.embedding = nnx.Param(model.embedding.get_value().at[token].set(jnp.nan))
    return dataclasses.replace(lm, model=model)

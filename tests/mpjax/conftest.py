"""A tiny random model, as a checkpoint folder and loaded, that tests of whole calls share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mpjax
from tests.mpjax.checkpoint.write_checkpoint import LLAMA, random_tensors, write_checkpoint

# Groups of 128 divide all input channels, and float32 leaves rounding out of comparisons.
TINY = LLAMA | {
    "vocab_size": 2048,
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


def write_tiny_model(folder: Path, layers: int = 1, **changes: Any) -> Path:
    """A checkpoint of the shape TINY with the bundled model's tokenizer; changes: of its config."""
    config = TINY | {"num_hidden_layers": layers} | changes
    tensors = random_tensors(config, np.random.default_rng(8))
    for name, tensor in tensors.items():
        # Small maps: a random model whose maps are large says the same token forever.
        tensors[name] = np.ones_like(tensor) if "norm" in name else tensor * np.float32(0.25)
    write_checkpoint(folder, config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mpjax.bundled_model() / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def exact_products() -> Iterator[None]:
    """float32 products in float32 on a GPU too, which would round to TensorFloat-32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint with random weights in float32, without a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> mpjax.LanguageModel:
    """The model in that folder."""
    return mpjax.load(tiny_folder)


@pytest.fixture(scope="session")
def two_layers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like the tiny one with two layers, for what differs between layers."""
    return write_tiny_model(tmp_path_factory.mktemp("two-layers") / "tiny", layers=2)


@pytest.fixture(scope="session")
def two_layers(two_layers_folder: Path) -> mpjax.LanguageModel:
    """The model in that folder."""
    return mpjax.load(two_layers_folder)


@pytest.fixture(scope="session")
def chat_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tiny-chat"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return folder

"""AWQ checkpoints with random weights in the shapes of a published model, to time loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mpjax.models import DecoderConfig, Qwen3

BYTES_PER_SHARD = 4 << 30


def write_awq(folder: Path, config: DecoderConfig, group_size: int = 128, seed: int = 0) -> None:
    """Writes a random AWQ checkpoint of a Qwen3 model: config.json and sharded safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = {
        "architectures": ["Qwen3ForCausalLM"],
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
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "version": "gemm",
            "zero_point": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(hf, indent=2))
    shard: dict[str, np.ndarray] = {}
    index: dict[str, str] = {}
    number = 0

    def flush() -> None:
        nonlocal number
        number += 1
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _tensors(config, group_size, np.random.default_rng(seed)):
        shard[name] = tensor
        if sum(array.nbytes for array in shard.values()) > BYTES_PER_SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _tensors(
    config: DecoderConfig, group: int, rng: np.random.Generator
) -> Iterator[tuple[str, np.ndarray]]:
    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape, np.int32)

    def dense(*shape: int) -> np.ndarray:
        # safetensors writes no bfloat16 from NumPy. float16 is converted when it is loaded.
        return (rng.random(shape, np.float32) * 0.04 - 0.02).astype(np.float16)

    for array in Qwen3.array_places(config):
        is_norm = len(array.shape) == 1
        yield array.name, np.ones(array.shape, np.float16) if is_norm else dense(*array.shape)
    for place in Qwen3.linear_places(config):
        for name, (channels, outputs) in zip(place.names, place.shapes, strict=True):
            yield f"{name}.qweight", words(channels, outputs // 8)
            yield f"{name}.qzeros", words(channels // group, outputs // 8)
            # Differences of uniform 4-bit codes and zeros have a deviation of about 6.5. With this
            # scale, outputs are about as large as inputs.
            scale = np.float16(1 / (6.5 * channels**0.5))
            yield f"{name}.scales", np.full((channels // group, outputs), scale)

"""Greedy tokens of the bundled model in each precision, on several devices against one.

It needs a process of its own with eight devices. With the argument `all`, it takes minutes, and the
model has all of its layers; with `some`, its first layer in the precisions whose activations are
rounded, or whose codes are cut in ways of their own:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.precisions_on_devices all`
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.checkpoint import safetensors
from tests.mpjax.checkpoint.write_checkpoint import write_checkpoint

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)

TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\nclass "
# Each way to store weights and to round activations, and each KV format, once.
PRECISIONS = (
    (2, "W16A16KV4"),
    (4, "W8A16KV8"),
    (8, "W4A16KV16"),
    (2, "W4g32A16KV8s"),
    (4, "WM8A16KV4t"),
    (8, "WM4A16KV4c"),
    (2, "WNF4A16KV2"),
    (4, "WNF3A16KV2t"),
    (8, "WNF2A16KV16"),
    (2, "WFP8A16KVfp8"),
    (4, "WMXFP4A16KV8H8E8"),
    (8, "WFP8AFP8KV16"),
    (2, "WFP8g128AFP8KV16"),
    (4, "W8A8KV16"),
    (8, "W4A8KV8H8A8"),
    (2, "W4AxKV4"),
)
SOME = tuple(
    case
    for case in PRECISIONS
    if case[1].startswith(("W4A8", "W4Ax", "W8A8", "WFP8g128AFP8", "WM4", "WFP8A16"))
)
LAYERS = 5


def with_layers(folder: Path, layers: int) -> Path:
    """The bundled model with the first of its layers alone."""
    source = mpjax.bundled_model()
    hf = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": layers}
    checkpoint = safetensors.Checkpoint.open(source)
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    names = [name for name in checkpoint.tensors if not _is_behind(name, layers)]
    return write_checkpoint(folder, hf, {name: checkpoint.read(name) for name in names})


def _is_behind(name: str, layers: int) -> bool:
    parts = name.split(".")
    return "layers" in parts and int(parts[parts.index("layers") + 1]) >= layers


def greedy(folder: Path, precision: str, devices: int) -> list[int]:
    """The likeliest token after each token of TEXT, which attends to a cache in the KV format."""
    lm = mpjax.load(folder, precision=precision, dtype="float32", devices=devices, progress=False)
    if precision.endswith(("KV8s", "KVfp8")):
        lm = mpjax.calibrate_cache(lm, [TEXT])
    ids = lm.tokenizer.encode(TEXT)
    assert lm.devices == devices
    cache = lm.model.create_cache(1, 128, lm.kv_format)
    step = jax.jit(lambda model, *given: model.step(*given, every_position=True)[0])
    logits = step(
        lm.model, jnp.asarray([ids], jnp.int32), jnp.asarray([len(ids)], jnp.int32), cache
    )
    return np.asarray(logits)[0].argmax(-1).tolist()


if __name__ == "__main__":
    cases, layers = {"all": (PRECISIONS, LAYERS), "some": (SOME, 1)}[sys.argv[1]]
    warnings.simplefilter("ignore")  # W4Ax without a calibration
    with tempfile.TemporaryDirectory() as made:
        folder = with_layers(Path(made) / "model", layers)
        for count, precision in cases:
            expected, found = (greedy(folder, precision, devices) for devices in (1, count))
            assert len(set(expected)) > 3, expected
            assert found == expected, (count, precision, found, expected)
    print(f"{len(cases)} precisions")

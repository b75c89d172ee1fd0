"""A checkpoint of each format on two, four and eight devices: the codes are those of one device.

It needs a process of its own with eight devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.formats_on_devices`
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from tests.models.sharded_decoders import require_same_arrays
from tests.mpjax.checkpoint.gguf.write_gguf import write_llama
from tests.mpjax.checkpoint.schemes.modules import FORMS
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)
from tests.mpjax.on_devices import SIZES

FORMATS = (
    *("awq", "gemv", "gptq-act-order", "gptq-8", "auto-round-gptq", "fp8", "fp8-channels"),
    *("fp8-one-scale", "pack", "int", "nvfp4", "nf4", "hqq"),
)


def write(folder: Path, name: str) -> Path:
    """A checkpoint whose linear maps are in a format."""
    rng = np.random.default_rng(5)
    form = FORMS[name]
    hf = CONFIGS["llama"] | SIZES | {"quantization_config": form.config}
    tensors = random_tensors(hf, rng)
    for linear, shape in linear_shapes(hf).items():
        replace_module(tensors, linear, form.module(rng, shape)[0])
    return write_checkpoint(folder, hf, tensors)


def check(source: Path, counts: Sequence[int] = (2, 4, 8)) -> None:
    """Loads a checkpoint on several numbers of devices, and gathers its codes."""
    given: dict[str, Any] = {"dtype": "float32", "progress": False}
    whole = mpjax.load(source, **given)
    for count in counts:
        lm = mpjax.load(source, devices=count, **given)
        assert (lm.devices, lm.precision) == (count, whole.precision)
        require_same_arrays(whole.model, lm.model.whole())  # type: ignore[attr-defined]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    with tempfile.TemporaryDirectory() as made:
        for each in FORMATS:
            check(write(Path(made) / each, each))
        # Its 64 channels are two groups.
        check(write_llama(Path(made) / "model.gguf", np.random.default_rng(5)), (2,))
    print(f"{len(FORMATS) + 1} formats")

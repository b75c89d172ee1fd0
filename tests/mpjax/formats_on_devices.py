"""A checkpoint of each format on two, four and eight devices: the codes are those of one device.

It needs a process of its own with eight devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.formats_on_devices`
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from mpjax.checkpoint.schemes import registry
from tests.models.sharded_decoders import require_same_arrays
from tests.mpjax.checkpoint.gguf.write_gguf import write_llama
from tests.mpjax.checkpoint.schemes import test_awq_gemv, test_hqq, test_nf4, test_nvfp4
from tests.mpjax.checkpoint.schemes.plain import random_plain
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CONFIGS,
    FP8,
    GPTQ,
    HQQ,
    compressed_fp8,
    compressed_integers,
    linear_shapes,
    random_tensors,
    replace_module,
    write_checkpoint,
)
from tests.mpjax.on_devices import SIZES

Module = Callable[[dict[str, Any], tuple[int, int], np.random.Generator], dict[str, Any]]


def encoded(*, symmetric: bool = False, **asked: Any) -> Module:
    """A module of random codes, by the format's own writer; asked: of `random_plain`."""

    def module(
        written: dict[str, Any], shape: tuple[int, int], rng: np.random.Generator
    ) -> dict[str, Any]:
        scheme = registry.read(written)
        assert scheme is not None
        seed = int(rng.integers(1 << 30))
        format = dataclasses.replace(scheme.format("a", shape[0]), symmetric=symmetric)
        plain = random_plain(format, shape, seed, **asked)
        return {suffix: np.array(array) for suffix, array in scheme.encode(plain, "a").items()}

    return module


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
# The quantization_config of a format, and the tensors of its modules.
FORMATS: dict[str, tuple[dict[str, Any], Module]] = {
    "awq": (AWQ, encoded()),
    "awq-gemv": (
        test_awq_gemv.CONFIG,
        lambda written, shape, rng: test_awq_gemv.module(rng, "gemv", shape)[0],
    ),
    "gptq-act-order": (
        GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"},
        encoded(permuted=True),
    ),
    "gptq-8": (GPTQ | {"bits": 8, "group_size": 64}, encoded(least_zero=1)),
    "auto-round": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"},
        encoded(least_zero=1),
    ),
    "fp8-blocks": (FP8, encoded(rows=128)),
    "fp8-channels": (compressed_fp8("channel", "token"), encoded()),
    "fp8-one-scale": (compressed_fp8("tensor", None), encoded(rows=1 << 20)),
    "pack-quantized": (compressed_integers(), encoded(symmetric=True)),
    "int-quantized": (compressed_integers("int-quantized"), encoded()),
    "nvfp4": (
        test_nvfp4.COMPRESSED,
        lambda written, shape, rng: test_nvfp4.module(written, rng, shape[::-1])[0],
    ),
    "nf4": (test_nf4.CONFIG, lambda written, shape, rng: test_nf4.module(rng, shape[::-1])[0]),
    "hqq": (HQQ, lambda written, shape, rng: test_hqq.module(rng, shape)[0]),
}


def write(folder: Path, name: str) -> Path:
    """A checkpoint whose linear maps are in a format."""
    rng = np.random.default_rng(5)
    written, module = FORMATS[name]
    hf = CONFIGS["llama"] | SIZES | {"quantization_config": written}
    tensors = random_tensors(hf, rng)
    for linear, shape in linear_shapes(hf).items():
        replace_module(tensors, linear, module(written, shape, rng))
    return write_checkpoint(folder, hf, tensors)


def check(source: Path, counts: Sequence[int] = (2, 4, 8)) -> None:
    """Loads a checkpoint on several numbers of devices, and gathers its codes."""
    given: dict[str, Any] = {"dtype": "float32", "progress": False}
    whole = mpjax.load(source, **given)
    for count in counts:
        lm = mpjax.load(source, devices=count, **given)
        assert (lm.devices, lm.precision) == (count, whole.precision)
        require_same_arrays(whole.model, lm.model.whole())


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    with tempfile.TemporaryDirectory() as made:
        for each in FORMATS:
            check(write(Path(made) / each, each))
        # Its 64 channels are two groups.
        check(write_llama(Path(made) / "model.gguf", np.random.default_rng(5)), (2,))
    print(f"{len(FORMATS) + 1} formats")

"""Reads a checkpoint's calibrated scales for an FP8 KV cache.

llm-compressor writes them in each attention module if quantization_config has a `kv_cache_scheme`:
`k_scale` and `v_scale`, one number for all heads ([1] or []), or one for each KV head ([heads] or
[heads, 1, 1]). A key is e4m3(code) · k_scale. ModelOpt writes them in the linear maps:
`k_proj.k_scale` and `v_proj.v_scale`. Source: compressed-tensors,
quantization/lifecycle/initialize.py and modeling/kvcache.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mpjax.checkpoint.safetensors import TensorInfo
from mpjax.checkpoint.schemes.checks import describe
from mpjax.checkpoint.schemes.policy import Policy
from mpjax.errors import CheckpointError
from mpjax.kernels import KVFormat
from mpjax.models import Decoder, DecoderConfig
from mpjax.models.kv_state import has_equal_heads
from mpjax.models.parameters import names_of

SUFFIXES = (".k_scale", ".v_scale")
DTYPES = ("bfloat16", "float16", "float32")


def names(decoder: type[Decoder], config: DecoderConfig) -> list[str]:
    """Names of the scale tensors of each layer: for keys, then for values."""
    layers = range(config.depth)  # a layer that drafts has scales of 1
    return [name for i in layers for name in names_of(decoder.names, "cache_scales", i)]


def of(
    tensors: Mapping[str, TensorInfo],
    decoder: type[Decoder],
    config: DecoderConfig,
    policy: Policy,
) -> tuple[str, ...]:
    """Names of a checkpoint's cache scales in the order of `names`; empty without any.

    tensors: the checkpoint's, which decide between llm-compressor's and ModelOpt's names, and
    whether scales exist if the policy makes them optional.
    """
    if not policy.has_cache_scales:
        return ()
    usual = names(decoder, config)
    found = [name if name in tensors else _of_map(name) for name in usual]
    if not any(name in tensors for name in found):
        return () if policy.may_lack_cache_scales else tuple(usual)
    if not has_equal_heads(config):
        raise CheckpointError(
            f"the files have scales for an FP8 cache, such as {found[0]}, and the model's layers "
            "have heads of different sizes, for which such scales are not read"
        )
    return tuple(found)


def _of_map(name: str) -> str:
    """ModelOpt's name of a scale: `a.k_proj.k_scale` for `a.k_scale`."""
    module, _, suffix = name.rpartition(".")
    return f"{module}.{suffix[0]}_proj.{suffix}"


def warn_of_dropped(folder: Path, tensors: Iterable[str], format: KVFormat) -> None:
    """Warns of a checkpoint's scales for an FP8 cache that are not loaded.

    tensors: the names of the checkpoint's tensors. format: the KV format.
    """
    found = next((name for name in sorted(tensors) if name.endswith(SUFFIXES)), None)
    if found is not None and "fp8" in (format.keys, format.values):
        warnings.warn(
            f"{folder} has scales for an FP8 cache, such as {found}, which are not read in this "
            "format: measure them with calibrate_cache, or the cache has scales of 1",
            stacklevel=4,
        )


def check(
    tensors: Mapping[str, TensorInfo], scales: Sequence[str], heads: int
) -> tuple[TensorInfo, ...]:
    """The scale tensors with the names in `scales`. heads: the number of KV heads.

    Raises CheckpointError for an unsupported dtype, and for a shape that is neither one number nor
    one for each KV head.
    """
    found = []
    for name in scales:
        info = tensors[name]
        shapes = ((), (1,), (heads,), (heads, 1, 1))
        if info.shape not in shapes or info.dtype.name not in DTYPES:
            raise CheckpointError(
                f"{name} is {describe(info)}: expected {', '.join(DTYPES)}, one number or one for "
                f"each of the {heads} KV heads"
            )
        found.append(info)
    return tuple(found)


def read(
    infos: tuple[TensorInfo, ...], heads: int, read_tensor: Callable[[TensorInfo], np.ndarray]
) -> np.ndarray:
    """Reads scales float32 [layers, 2 (keys, values), KV heads].

    Raises CheckpointError for a scale that is not positive and finite.
    """
    scales = []
    for info in infos:
        values = read_tensor(info).astype(np.float32).reshape(-1)
        if not all(value > 0 and math.isfinite(value) for value in values):
            raise CheckpointError(
                f"{info.name} is {values.tolist()}: expected positive, finite scales; the "
                "checkpoint is damaged"
            )
        scales.append(np.broadcast_to(values, (heads,)))
    return np.stack(scales).reshape(-1, 2, heads)

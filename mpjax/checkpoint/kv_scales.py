"""Reads a checkpoint's calibrated scales for an FP8 KV cache.

llm-compressor writes them beside each attention layer's maps, where quantization_config has a
`kv_cache_scheme`: `k_scale` and `v_scale`, one number for all heads ([1] or []), or one for each KV
head ([heads] or [heads, 1, 1]). A key is e4m3(code) · k_scale. ModelOpt's are those of maps,
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
from mpjax.models.parameters import names_of

SUFFIXES = (".k_scale", ".v_scale")
DTYPES = ("bfloat16", "float16", "float32")


def names(decoder: type[Decoder], config: DecoderConfig) -> list[str]:
    """Names of the scale tensors of each layer, the keys' first and then the values'."""
    layers = range(config.num_layers)
    return [name for i in layers for name in names_of(decoder.names, "cache_scales", i)]


def of(
    tensors: Mapping[str, TensorInfo],
    decoder: type[Decoder],
    config: DecoderConfig,
    policy: Policy,
) -> tuple[str, ...]:
    """Names of the scales that a checkpoint has by its policy, in the order of `names`, or none.

    tensors: of the checkpoint. They decide between the names that writers use, and whether there
    are any where the policy may lack them.
    """
    if not policy.has_cache_scales:
        return ()
    usual = names(decoder, config)
    found = [name if name in tensors else _of_map(name) for name in usual]
    if not any(name in tensors for name in found):
        return () if policy.may_lack_cache_scales else tuple(usual)
    return tuple(found)


def _of_map(name: str) -> str:
    """The name of a scale beside its map: `a.k_proj.k_scale` for `a.k_scale`."""
    module, _, suffix = name.rpartition(".")
    return f"{module}.{suffix[0]}_proj.{suffix}"


def warn_of_dropped(folder: Path, tensors: Iterable[str], format: KVFormat) -> None:
    """Warns of scales for an FP8 cache that a checkpoint has and the model does not get.

    tensors: the names of a checkpoint's tensors, none of which is read as a scale of the cache.
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
    """The scale tensors of some names. heads: the number of KV heads.

    Raises CheckpointError for another dtype, and for a shape that is neither one number nor one for
    each KV head.
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

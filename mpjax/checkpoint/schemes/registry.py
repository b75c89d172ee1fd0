"""Registry of the quantised checkpoint formats that can be read and written, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint.schemes import auto_round, mixed
from mpjax.checkpoint.schemes.awq import AWQScheme
from mpjax.checkpoint.schemes.awq_gemv import AWQGemvScheme
from mpjax.checkpoint.schemes.base import Scheme, Specs
from mpjax.checkpoint.schemes.fp8 import FP8Scheme
from mpjax.checkpoint.schemes.gguf import GGUFScheme
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.checkpoint.schemes.hqq import HQQScheme
from mpjax.checkpoint.schemes.int_quantized import IntQuantizedScheme
from mpjax.checkpoint.schemes.mxfp4 import MXFP4Scheme
from mpjax.checkpoint.schemes.nf4 import NF4Scheme
from mpjax.checkpoint.schemes.nvfp4 import NVFP4Scheme
from mpjax.checkpoint.schemes.pack_quantized import PackQuantizedScheme
from mpjax.errors import CheckpointError

SCHEMES: list[type[Scheme]] = [
    AWQScheme,
    AWQGemvScheme,
    GPTQScheme,
    NVFP4Scheme,
    NF4Scheme,
    FP8Scheme,
    PackQuantizedScheme,
    IntQuantizedScheme,
    MXFP4Scheme,
    HQQScheme,
    GGUFScheme,
]


def read(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`, which may mix several.

    Raises CheckpointError for a format that is not registered.
    """
    config = auto_round.translate(config)
    written = mixed.split(config)
    if written is None:
        return _read_one(config)
    parts = tuple(mixed.Part(targets, _read_one(alone)) for targets, alone in written)
    first, *others = (part.scheme for part in parts)
    if all(scheme == first for scheme in others):
        return first
    return mixed.MixedScheme(parts, any(part.scheme.has_cache_scales for part in parts))


def _read_one(config: Mapping[str, Any]) -> Scheme:
    for scheme in SCHEMES:
        if scheme.matches(config):
            return scheme.from_config(config)
    method = config.get("quant_method", config.get("method"))
    first, *others = SCHEMES
    titles = ", ".join([f"{first.article} {first.title}", *(other.title for other in others)])
    raise CheckpointError(
        f"quant_method {method!r:.80} is not supported: load {titles} or 16-bit checkpoint of the "
        "model (a 16-bit one can be quantised with precision='W4A16KV8')"
    )


def of_module(specs: Specs) -> type[Scheme] | None:
    """The format of a module, judged by its tensors alone; None for a module in 16 bits."""
    return next((scheme for scheme in SCHEMES if scheme.holds(specs)), None)


def layouts() -> dict[str, type[Scheme]]:
    """The scheme of each layout that can be written, by the layout's name."""
    return {layout: scheme for scheme in SCHEMES for layout in scheme.layouts}

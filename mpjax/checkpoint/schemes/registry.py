"""Registry of the schemes of quantised checkpoints, one line each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpjax.checkpoint.schemes import (
    auto_round,
    awq,
    awq_gemv,
    checks,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    hqq,
    int_quantized,
    modelopt,
    mxfp4,
    nf4,
    nvfp4,
    pack_quantized,
)
from mpjax.checkpoint.schemes.compressed_tensors import LINEAR
from mpjax.checkpoint.schemes.policy import Part, Policy
from mpjax.checkpoint.schemes.reader import Reader
from mpjax.checkpoint.schemes.scheme import Rule, Scheme
from mpjax.checkpoint.schemes.tensors import Specs
from mpjax.checkpoint.schemes.writing import Writing
from mpjax.errors import CheckpointError

SCHEMES: list[Scheme] = [
    awq.SCHEME,
    awq_gemv.SCHEME,
    gptq.SCHEME,
    nvfp4.SCHEME,
    nf4.SCHEME,
    fp8.SCHEME,
    pack_quantized.SCHEME,
    int_quantized.SCHEME,
    mxfp4.SCHEME,
    hqq.SCHEME,
    gguf.SCHEME,
]
# `quant_method` → module with `split` and `has_cache_scales`, for methods whose checkpoints may mix
# formats or have scales for an FP8 cache.
MIXTURES = {compressed_tensors.METHOD: compressed_tensors, modelopt.METHOD: modelopt}


def read(config: Mapping[str, Any]) -> Policy:
    """The policy of a `quantization_config`, which may mix several formats.

    Raises CheckpointError for an unsupported format.
    """
    config = auto_round.translate(config)
    method = str(checks.method_of(config))
    mixture = MIXTURES.get(method)
    written = None if mixture is None else mixture.split(config)
    if written is None:
        parts = [_read_one(config)]
    else:
        parts = [
            dataclasses.replace(_read_one(alone), targets=targets) for targets, alone in written
        ]
        if all((part.scheme, part.rules) == (parts[0].scheme, parts[0].rules) for part in parts):
            parts = parts[:1]
    return Policy(method, tuple(parts), mixture is not None and mixture.has_cache_scales(config))


def _read_one(config: Mapping[str, Any]) -> Part:
    for scheme in SCHEMES:
        if scheme.is_of(config):
            found = scheme.read(config)
            rules = (Rule((LINEAR,), found),) if isinstance(found, Reader) else tuple(found)
            if not any(rule.reader is not None and rule.targets for rule in rules):
                raise CheckpointError(
                    f"config.json has {scheme.article} {scheme.title} quantization_config, and its "
                    "targets name no module: expected Linear, or names of modules"
                )
            return Part(scheme, rules)
    first, *others = SCHEMES
    titles = ", ".join([f"{first.article} {first.title}", *(other.title for other in others)])
    raise CheckpointError(
        f"quant_method {checks.method_of(config)!r:.80} is not supported: load {titles} or 16-bit "
        "checkpoint of the model (a 16-bit one can be quantised with precision='W4A16KV8')"
    )


def of_module(specs: Specs) -> Scheme | None:
    """The scheme of a module, by its tensors alone; None for a module in 16 bits."""
    return next((scheme for scheme in SCHEMES if scheme.reader.holds(specs)), None)


def layouts() -> dict[str, Writing]:
    """Export layout → how it is written."""
    written = [scheme.writing for scheme in SCHEMES if scheme.writing is not None]
    return {layout: writing for writing in written for layout in writing.layouts}

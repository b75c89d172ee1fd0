"""Quantises one linear map, or a stack of experts, from statistics of its inputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import pack
from mpjax.kernels.quantize import why_out_of_range
from mpjax.models import Linear
from mpjax.models.stack import stack, unstack
from mpjax.quantization.methods import choose_codes
from mpjax.quantization.recipe import Rule
from mpjax.quantization.statistics import Statistics

SHOWN_EXPERTS = 8  # listed in a warning


def quantize_map(
    linear: Linear,
    path: str,
    rule: Rule,
    found: Statistics | None,
    order: jax.Array | None = None,
) -> Linear:
    """The linear map, or stack of experts, with a packed kernel.

    found: the statistics of its inputs, for experts with a leading axis; None if none are needed.
    order: int32 [K], for experts [experts, K], the input channel of each row of codes, and the
        channel order of the statistics; None for the original order.

    Warns if the text is too short for GPTQ, for experts by number. Raises ValueError for weights
    out of the format's range.
    """
    kernel: Any = linear.kernel.get_value()
    if kernel.ndim > 2:
        return _quantize_experts(linear, path, rule, found, order)
    rounding, channels = rule.method.rounding, kernel.shape[0]
    is_gptq = rounding.startswith("gptq")
    if is_gptq and found is not None and int(found.tokens) < channels:
        rounding = "range"
        warnings.warn(
            f"{path} has {channels} input channels, and the text has {int(found.tokens)} tokens: "
            "GPTQ needs at least as many tokens, so that the method range is taken instead; give "
            "more text",
            stacklevel=2,
        )
    return _quantize(linear, path, rule, found, rounding, order)


def _quantize_experts(
    stacked: Linear,
    path: str,
    rule: Rule,
    found: Statistics | None,
    order: jax.Array | None,
) -> Linear:
    """Quantises expert by expert: with too few tokens by `range`, without any by `rtn`."""
    experts, channels, _ = stacked.kernel.get_value().shape
    names = [f"{path}, expert {expert}" for expert in range(experts)]
    short = []

    def each() -> Iterator[Linear]:
        for expert, linear in enumerate(unstack(stacked, experts)):
            rounding, own = rule.method.rounding, None
            if found is not None:
                own = jax.tree.map(lambda leaf, i=expert: leaf[i], found)
                tokens = int(own.tokens)
                least = channels if rounding.startswith("gptq") else 1
                if rounding != "rtn" and tokens < least:
                    short.append(f"{expert} ({tokens})")
                    rounding = "range" if tokens else "rtn"
            own_order = None if order is None else order[expert]
            yield _quantize(linear, names[expert], rule, own, rounding, own_order)

    quantized = stack(each(), names, 1)
    if short:
        shown = ", ".join(short[:SHOWN_EXPERTS]) + (", ..." if len(short) > SHOWN_EXPERTS else "")
        warnings.warn(
            f"{path}: {len(short)} of {experts} experts saw too few tokens of the text for "
            f"{rule.method.rounding}: {shown}; the method range is taken for them instead, and rtn "
            "for those without a token; give more text",
            stacklevel=3,
        )
    return quantized


def _quantize(
    linear: Linear,
    name: str,
    rule: Rule,
    found: Statistics | None,
    rounding: str,
    order: jax.Array | None = None,
) -> Linear:
    kernel: Any = linear.kernel.get_value()
    weight = kernel.astype(jnp.float32)
    weight = weight if order is None else weight[order]
    plain = choose_codes(weight, found, rule.weights, rounding, name)
    packed = pack(dataclasses.replace(plain, permutation=order) if order is not None else plain)
    if reason := why_out_of_range(weight, packed):
        raise ValueError(f"{name}: {reason}")
    return Linear(packed, None if linear.bias is None else linear.bias.get_value())

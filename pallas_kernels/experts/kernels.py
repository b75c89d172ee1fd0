"""Launches of the kernels of grouped products, and the reasons why a call can't be launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.activation_blocks import ActivationBlocks
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts import counting, triton
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.plans import (
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    Problem,
    why_not_warpgroups,
)
from mpjax.kernels.experts.rounding import round_to_blocks
from mpjax.kernels.experts.tiles import Tiles, one_for_each_pair, sorted_by_expert
from mpjax.kernels.gemm.plans import can_be_operand
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.rowwise.api import quantize_rows


def products_by_kernel(
    config: ExpertsConfig | ExpertsWarpgroupConfig,
    divided: DividedRows | None,
    is_local: bool,
    x: jax.Array,
    weight: Any,
    experts: jax.Array,
    epilogue: Epilogue,
) -> jax.Array:
    """Products [tokens, k, N], or with routing weights terms float32 [terms, tokens, N].

    divided: how parts of rows are rounded; None for whole rows. Other arguments are as in Call.
    """
    rows, weight = in_packed_order(x, weight, experts, divided)
    has_terms = epilogue.routing_weights is not None
    # Triton's terms are summed by the next kernel, warpgroups' terms before they are returned.
    by_warpgroups = isinstance(config, ExpertsWarpgroupConfig)
    out_dtype = jnp.dtype(jnp.float32) if has_terms and not by_warpgroups else x.dtype
    apart = epilogue.gate if config.splits > 1 else None  # a gate needs whole sums
    if apart is not None:
        epilogue = dataclasses.replace(epilogue, gate=None)
    tiles = find_tiles(experts, weight.shape[0], config, is_local=is_local)
    terms = _products_of(config)(rows, weight, tiles, epilogue, config, out_dtype)
    if has_terms:
        has_all = by_warpgroups or not is_local
        return terms if has_all else _without_others(terms, experts)
    # XLA fuses the sum, in a fixed order, with the gate.
    found = terms[0] if len(terms) == 1 else terms.sum(0)
    if apart is not None:
        found = apart(*jnp.split(found.astype(jnp.float32), 2, -1))
    return found.astype(out_dtype).reshape(*experts.shape, -1)


def _without_others(terms: jax.Array, experts: jax.Array) -> jax.Array:
    """Terms [splits · k, tokens, N] with zeros for pairs without an expert, which nobody stored.

    experts: int32 [tokens, k], −1 for no expert of the stack.
    """
    tokens, per_token = experts.shape
    split = terms.reshape(-1, per_token, tokens, terms.shape[-1])
    return jnp.where((experts.T >= 0)[None, ..., None], split, 0.0).reshape(terms.shape)


def _products_of(config: ExpertsConfig | ExpertsWarpgroupConfig) -> Callable[..., jax.Array]:
    """The function that launches the kernel for this kind of configuration."""
    if isinstance(config, ExpertsConfig):
        return triton.products
    from mpjax.kernels.experts import warpgroups  # here, as importing it takes a while

    return warpgroups.products


def find_tiles(
    experts: jax.Array,
    count: int,
    config: ExpertsConfig | ExpertsWarpgroupConfig,
    *,
    is_local: bool = False,
) -> Tiles:
    """The tiles of experts [tokens, k] below `count`, by the configuration's tiling.

    is_local: whether experts may be −1; such pairs are in no tile.
    """
    if config.tiling == "pairs":
        tiles = one_for_each_pair(experts)
    elif config.tiling == "counted":
        tiles = counting.counted(experts, count, config.tile_m)
    else:
        if is_local:  # experts outside of the weight come last
            experts = jnp.where(experts < 0, count, experts)
        tiles = sorted_by_expert(experts, count, config.tile_m)
    return dataclasses.replace(tiles, is_partial=is_local)


def in_packed_order(
    x: jax.Array, weight: Any, experts: jax.Array | None, divided: DividedRows | None
) -> tuple[Any, Any]:
    """The rows of x as the kernel expects them, and the weight without a permutation.

    experts: int32 [tokens, k], the experts of x's rows; None if all experts use the same rows.
    """
    if not isinstance(weight, QuantizedTensor):
        return x.reshape(-1, x.shape[-1]), weight
    if isinstance(weight.activations, ActivationBlocks):
        of_rows = None if experts is None else experts.reshape(-1)
        rounded = round_to_blocks(x.reshape(-1, x.shape[-1]), weight.activations, of_rows)
        return rounded, dataclasses.replace(weight, permutation=None)
    if weight.permutation is not None:  # experts have different orders, so each pair has a row
        assert experts is not None
        order = weight.permutation[experts]  # [tokens, k, K]
        x = jnp.take_along_axis(x if x.ndim == 3 else x[:, None], order, -1)
        weight = dataclasses.replace(weight, permutation=None)
    if weight.format.symmetric and x.dtype != jnp.bfloat16:
        unsymmetric = dataclasses.replace(weight.format, symmetric=False)
        weight = dataclasses.replace(weight, format=unsymmetric)
    rows, activations = x.reshape(-1, x.shape[-1]), ActivationFormat.of(weight.format)
    return (quantize_rows(rows, divided or activations) if activations.values else rows), weight


def why_not(name: str, problem: Problem, x: jax.Array, weight: Any) -> str | None:
    """The reason why a kernel can't run as an implementation, or None if it can."""
    reason = _why_not_triton(x, weight)
    if reason is not None or name == "triton":
        return reason
    if reason := why_not_warpgroups(problem):
        return reason
    if not isinstance(weight, QuantizedTensor):
        if weight.dtype == x.dtype:
            return None
        return f"x is {x.dtype} and the weight {weight.dtype}, expected one dtype"
    in_operand = weight.format.group_size is not None and weight.format.operand is None
    if in_operand and not can_be_operand(weight.scale_dtype, jnp.dtype(x.dtype)):
        return f"scales are {weight.scale_dtype}, whose range {x.dtype} does not have"
    return None


def _why_not_triton(x: jax.Array, weight: Any) -> str | None:
    if reason := device.why_triton_cannot_run():
        return reason
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype}, expected bfloat16 or float16"
    if not isinstance(weight, QuantizedTensor):
        if weight.dtype in (jnp.bfloat16, jnp.float16):
            return None
        return f"the weight is {weight.dtype}, expected bfloat16, float16 or a packed format"
    if weight.format.operand == "float8" and (reason := device.why_not_float8()):
        return reason
    sizes = x.size * weight.shape[0], weight.words.size
    return device.why_too_large(max(sizes)) if weight.format.operand else None

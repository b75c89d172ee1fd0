"""The public product of tokens and the experts that they are routed to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import (
    are_between,
    as_array,
    optional_array,
    require_floats,
    require_type,
    shown,
)
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts import counting, reference, triton
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.gradient import differentiable
from mpjax.kernels.experts.local import LocalExperts
from mpjax.kernels.experts.plans import (
    ExpertsConfig,
    ExpertsWarpgroupConfig,
    Problem,
    config_of,
    plan_by_rule,
    plan_of,
    warpgroup_config_of,
    why_not_warpgroups,
)
from mpjax.kernels.experts.tiles import Tiles, one_for_each_pair, sorted_by_expert
from mpjax.kernels.gemm.plans import can_be_operand
from mpjax.kernels.implementation import choose
from mpjax.kernels.product_format import ActivationFormat
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.rowwise.api import quantize_rows

Implementation = Literal["triton", "mosaic", "reference"]


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array | LocalExperts,
    *,
    routing_weights: jax.Array | None = None,
    bias: jax.Array | None = None,
    gate: Gate | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The products of tokens with the matrices of the experts that they are routed to.

    Token t's j-th product is x[t] · weight[experts[t, j]], or x[t, j] · … where x has a row for
    each expert. Nothing but the chosen experts' matrices is read on a GPU.

    x: [..., K], or [..., k, K]. weight: [experts, K, N], a stack of plain matrices, or a
        QuantizedTensor with one leading axis, in any weight format.
    experts: int [..., k], the numbers of each token's experts; an expert may have any number of
        tokens, also none or all. Of LocalExperts, those that the weight does not have add nothing
        to sums with routing weights, and read nothing; without, their products are any numbers.
    routing_weights: [..., k]. If they are given, the result is the sum of a token's products times
        them, in the order of k; without, it is all products.
    bias: [experts, N], added to the products, before a gate and routing weights.
    gate: maps the two halves of a product, gate and up, to one.
    implementation: `triton`, the fused kernel, on a CUDA GPU of compute capability 8.0 or more, for
        x in bfloat16 or float16; `mosaic`, a kernel of warpgroups for many tokens, on compute
        capability 9.0 alone, for packed weights; or `reference`, a loop over all experts in plain
        jnp in float32. By default the faster kernel that can run.

    Returns [..., k, N], with a gate [..., k, N / 2], and with routing weights without the axis k,
    in the dtype of x.
    Differentiable in reverse with respect to x, routing weights, the bias and a plain weight.
    Raises ValueError for shapes that don't fit and, where values are known, for experts that there
    are none of; and UnsupportedError, with the reason, if a forced implementation can't run.
    """
    call = _read("grouped_matmul", x, weight, experts, Epilogue(bias, gate, routing_weights))
    found, dtype = _run(call, implementation), call.x.dtype
    if routing_weights is not None:
        found = found[0] if len(found) == 1 else found.astype(jnp.float32).sum(0)
    return found.astype(dtype).reshape(*call.tokens, *found.shape[1:])


def grouped_matmul_terms(
    x: jax.Array,
    weight: jax.Array | QuantizedTensor,
    experts: jax.Array | LocalExperts,
    routing_weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    activations: DividedRows | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The terms float32 [terms, ..., N] whose sum over the first axis is that of `grouped_matmul`.

    They are for a consumer that adds them up itself, as `add_rms_norm` does. Arguments, errors and
    derivatives are as for `grouped_matmul` with routing weights.

    activations: how x is rounded where it and the weight are parts of rows and of input channels;
        None for whole ones. Its format is that of the weight's activations.
    """
    if activations is not None:
        _check_divided_rows("grouped_matmul_terms", activations, weight)
    weights = as_array("grouped_matmul_terms: routing_weights", routing_weights)
    call = _read("grouped_matmul_terms", x, weight, experts, Epilogue(bias, None, weights))
    terms = _run(call, implementation, activations)
    return terms.reshape(len(terms), *call.tokens, terms.shape[-1])


def _check_divided_rows(operation: str, activations: Any, weight: Any) -> None:
    """Raises ValueError for a rounding that is not the weight's own."""
    require_type(f"{operation}: activations", activations, DividedRows)
    is_packed = isinstance(weight, QuantizedTensor)
    own = weight.activations if is_packed else ActivationFormat()
    if own != activations.format:
        kind = weight.format if is_packed else "plain"
        raise ValueError(
            f"{operation}: activations are rounded to {activations.format}, and beside a weight in "
            f"{kind} to {own}: expected None, or DividedRows of the weight's own format"
        )


class _Call(NamedTuple):
    """The arguments of a product, checked, with one axis of tokens."""

    x: jax.Array  # [tokens, K] or [tokens, k, K]
    weight: Any  # [experts, K, N]
    experts: jax.Array  # [tokens, k]
    epilogue: Epilogue
    tokens: tuple[int, ...]  # the axes that the tokens had
    is_local: bool  # whether experts may be −1


def _run(
    call: _Call, implementation: Implementation | None, rows: DividedRows | None = None
) -> jax.Array:
    """Products [tokens, k, N], or with routing weights terms float32 [terms, tokens, N]."""
    x, weight, experts, epilogue, *_ = call
    problem = Problem.of(experts.shape, weight, gated=epilogue.gate is not None)
    name = choose(
        "grouped_matmul",
        implementation,
        "reference" if x.size == 0 else _default(problem, x, weight),
        get_args(Implementation),
        lambda name: _why_not(name, problem, x, weight),
    )
    if name != "reference":
        config = config_of(problem) if name == "triton" else warpgroup_config_of(problem)
        run = functools.partial(_by_kernel, config, rows, call.is_local)
        return differentiable(run, x, weight, experts, epilogue)
    found = reference.products(x, weight, experts, epilogue, rows)
    return found if epilogue.routing_weights is None else jnp.moveaxis(found, 1, 0)


def _by_kernel(
    config: ExpertsConfig | ExpertsWarpgroupConfig,
    divided: DividedRows | None,
    is_local: bool,
    x: jax.Array,
    weight: Any,
    experts: jax.Array,
    epilogue: Epilogue,
) -> jax.Array:
    rows, weight = _in_packed_order(x, weight, experts, divided)
    out_dtype = x.dtype if epilogue.routing_weights is None else jnp.dtype(jnp.float32)
    apart = epilogue.gate if config.splits > 1 else None  # it takes whole sums
    if apart is not None:
        epilogue = dataclasses.replace(epilogue, gate=None)
    tiles = _tiles(experts, weight.shape[0], config, is_local)
    terms = _products_of(config)(rows, weight, tiles, epilogue, config, out_dtype)
    if epilogue.routing_weights is not None:
        is_stored = not is_local or isinstance(config, ExpertsWarpgroupConfig)
        return terms if is_stored else _without_others(terms, experts)
    # XLA fuses the sum, in a fixed order, with the gate.
    found = terms[0] if len(terms) == 1 else terms.sum(0)
    if apart is not None:
        found = apart(*jnp.split(found.astype(jnp.float32), 2, -1))
    return found.astype(out_dtype).reshape(*experts.shape, -1)


def _without_others(terms: jax.Array, experts: jax.Array) -> jax.Array:
    """Terms [splits · k, tokens, N], with zeros in the place of those that no program has stored.

    experts: int32 [tokens, k], −1 for those.
    """
    tokens, per_token = experts.shape
    split = terms.reshape(-1, per_token, tokens, terms.shape[-1])
    return jnp.where((experts.T >= 0)[None, ..., None], split, 0.0).reshape(terms.shape)


def _products_of(config: ExpertsConfig | ExpertsWarpgroupConfig) -> Callable[..., jax.Array]:
    """The function that launches the kernel of a configuration."""
    if isinstance(config, ExpertsConfig):
        return triton.products
    from mpjax.kernels.experts import warpgroups  # here, as importing it takes a while

    return warpgroups.products


def _tiles(
    experts: jax.Array,
    count: int,
    config: ExpertsConfig | ExpertsWarpgroupConfig,
    is_local: bool,
) -> Tiles:
    if config.tiling == "pairs":
        tiles = one_for_each_pair(experts)
    elif config.tiling == "counted":
        tiles = counting.counted(experts, count, config.tile_m)
    else:
        if is_local:  # those that the weight does not have come last
            experts = jnp.where(experts < 0, count, experts)
        tiles = sorted_by_expert(experts, count, config.tile_m)
    return dataclasses.replace(tiles, is_partial=is_local)


def _in_packed_order(
    x: jax.Array, weight: Any, experts: jax.Array, divided: DividedRows | None
) -> tuple[Any, Any]:
    """The rows of x as the kernel takes them, and the weight without a permutation."""
    if not isinstance(weight, QuantizedTensor):
        return x.reshape(-1, x.shape[-1]), weight
    if weight.permutation is not None:  # each expert's own, so that each pair has a row of its own
        order = weight.permutation[experts]  # [tokens, k, K]
        x = jnp.take_along_axis(x if x.ndim == 3 else x[:, None], order, -1)
        weight = dataclasses.replace(weight, permutation=None)
    if weight.format.symmetric and x.dtype != jnp.bfloat16:
        unsymmetric = dataclasses.replace(weight.format, symmetric=False)
        weight = dataclasses.replace(weight, format=unsymmetric)
    rows, activations = x.reshape(-1, x.shape[-1]), ActivationFormat.of(weight.format)
    return (quantize_rows(rows, divided or activations) if activations.values else rows), weight


def _default(problem: Problem, x: jax.Array, weight: Any) -> str:
    """The planned implementation, or the next best where it can't do the call."""
    name = plan_of(problem).implementation
    if name == "mosaic" and _why_not(name, problem, x, weight) is not None:
        return plan_by_rule(problem, warpgroups=False).implementation
    return name


def _why_not(name: str, problem: Problem, x: jax.Array, weight: Any) -> str | None:
    reason = _why_not_triton(x, weight)
    if reason is not None or name == "triton":
        return reason
    if reason := why_not_warpgroups(problem):
        return reason
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
    if weight.activation_bits is not None:
        return f"{weight.format} has blocks of activations in 4 bits, which differ by expert"
    if weight.format.operand == "float8" and (reason := device.why_not_float8()):
        return reason
    sizes = x.size * weight.shape[0], weight.words.size
    return device.why_too_large(max(sizes)) if weight.format.operand else None


def _read(operation: str, x: Any, weight: Any, experts: Any, epilogue: Epilogue) -> _Call:
    """Converts the arguments to arrays. Raises ValueError where their shapes don't fit."""
    is_local = isinstance(experts, LocalExperts)
    experts = as_array(f"{operation}: experts", experts.numbers if is_local else experts)
    x = as_array(f"{operation}: x", x)
    require_floats(operation, x=x)
    if not isinstance(weight, QuantizedTensor):
        weight = as_array(f"{operation}: the weight", weight)
        require_floats(operation, weight=weight)
    if len(weight.shape) != 3 or 0 in weight.shape:
        raise ValueError(
            f"{operation}: the weight has shape {tuple(weight.shape)}: expected a stack of "
            "matrices [experts, K, N], with one of each or more"
        )
    count, channels, outputs = weight.shape
    is_integer = jnp.issubdtype(experts.dtype, jnp.integer)
    if not experts.ndim or not experts.shape[-1] or not is_integer:
        raise ValueError(
            f"{operation}: experts are {shown(experts)}: expected integers of shape [..., k], with "
            "one expert or more for each token"
        )
    if x.shape not in ((*experts.shape[:-1], channels), (*experts.shape, channels)):
        raise ValueError(
            f"{operation}: x has shape {x.shape}: expected {(*experts.shape[:-1], channels)} or "
            f"{(*experts.shape, channels)}, by the experts and the weight"
        )
    if not are_between(experts, -1 if is_local else 0, count - 1):
        raise ValueError(f"{operation}: experts must be from 0 to {count - 1}")
    epilogue = _read_epilogue(operation, epilogue, experts.shape, (count, outputs))
    per_token = experts.shape[-1]
    numbers = experts.reshape(-1, per_token).astype(jnp.int32)
    if is_local and epilogue.routing_weights is not None:
        mine = jnp.where(numbers >= 0, epilogue.routing_weights, 0)
        epilogue = dataclasses.replace(epilogue, routing_weights=mine)
    own_rows = x.ndim > experts.ndim
    return _Call(
        x.reshape(-1, per_token, channels) if own_rows else x.reshape(-1, channels),
        weight,
        numbers,
        epilogue,
        experts.shape[:-1],
        is_local,
    )


def _read_epilogue(
    operation: str, epilogue: Epilogue, chosen: tuple[int, ...], outputs: tuple[int, int]
) -> Epilogue:
    """The epilogue with arrays, and one axis of tokens. Raises ValueError where shapes don't fit.

    chosen: the shape of the experts. outputs: the numbers of experts and of each one's outputs.
    """
    weights = optional_array(f"{operation}: routing_weights", epilogue.routing_weights)
    bias = optional_array(f"{operation}: bias", epilogue.bias)
    for name, array, shape in (("routing_weights", weights, chosen), ("bias", bias, outputs)):
        if array is not None and array.shape != shape:
            raise ValueError(f"{operation}: {name} has shape {array.shape}: expected {shape}")
    if epilogue.gate is not None:
        require_type(f"{operation}: gate", epilogue.gate, Gate)
        if outputs[1] % 2:
            raise ValueError(f"{operation}: {outputs[1]} outputs have no halves, gate and up")
    weights = None if weights is None else weights.reshape(-1, chosen[-1])
    return Epilogue(bias, epilogue.gate, weights)

"""The gated MLPs of experts: two grouped products with one order of rows.

If warpgroups run both products, the results of the first stay sorted by expert, as the second needs
them, which saves two copies. For few tokens, the first product may choose experts itself
(`routed_mlp`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels.checks import as_array, require_type, shown
from mpjax.kernels.divided_rows import DividedRows
from mpjax.kernels.experts.api import Implementation, grouped_matmul, grouped_matmul_terms
from mpjax.kernels.experts.arguments import (
    check_divided_rows,
    read_call,
    require_no_activation_scale,
)
from mpjax.kernels.experts.epilogue import Epilogue
from mpjax.kernels.experts.gate import Gate
from mpjax.kernels.experts.kernels import find_tiles, in_packed_order, why_not
from mpjax.kernels.experts.local import LocalExperts
from mpjax.kernels.experts.logits import RouterLogits
from mpjax.kernels.experts.plans import ExpertsWarpgroupConfig, Problem, joint_configs_of
from mpjax.kernels.experts.rounding import has_own_blocks, round_in_tiles
from mpjax.kernels.experts.routed_mlp import Routed, routed_products
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.quantized_tensor import QuantizedTensor
from mpjax.kernels.rowwise.api import hadamard

Configs = tuple[ExpertsWarpgroupConfig, ExpertsWarpgroupConfig]  # of both products


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["gate_up", "down", "gate_up_bias", "down_bias"],
    meta_fields=["gate", "hadamard"],
)
@dataclasses.dataclass(frozen=True)
class ExpertMLP:
    """The gated MLPs of all experts: x ↦ T(gate(x · gate_up + bias)) · down + bias.

    gate_up: [experts, K, 2 · I] and down: [experts, I, N], plain or QuantizedTensors. gate:
    combines gate and up, the halves of the first product (static). Biases are [experts, 2 · I] and
    [experts, N]. hadamard: the block size of the Hadamard transform T (static; see `hadamard`);
    None: no transform.
    """

    gate_up: jax.Array | QuantizedTensor
    down: jax.Array | QuantizedTensor
    gate: Gate = dataclasses.field(default_factory=Gate)
    gate_up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    hadamard: int | None = None

    def mixed(self, inner: jax.Array) -> jax.Array:
        """T(inner), the input of `down` [..., I], in the dtype of `inner`."""
        if self.hadamard is None:
            return inner
        return hadamard(inner, self.hadamard, dtype=inner.dtype)


def expert_mlp_terms(
    x: jax.Array,
    mlp: ExpertMLP,
    experts: jax.Array | LocalExperts | RouterLogits,
    routing_weights: jax.Array | None = None,
    *,
    activations: DividedRows | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Terms float32 [terms, ..., N] whose sum is the weighted sum of each token's experts.

    It is `grouped_matmul` with the gate, `hadamard` if the MLP has a transform, and
    `grouped_matmul_terms` with the routing weights, and has their arguments, errors and
    derivatives.

    x: [..., K]. experts: int [..., k], or LocalExperts, with routing_weights [..., k]; or only
        RouterLogits, from which the first product of few tokens chooses experts itself.
    activations: how the second product rounds its input, if the input and `down` have only some of
        the input channels.
    """
    require_type("expert_mlp_terms: mlp", mlp, ExpertMLP)
    for weight in (mlp.gate_up, mlp.down):
        require_no_activation_scale("expert_mlp_terms", weight)
    if (routing_weights is None) != isinstance(experts, RouterLogits):
        raise ValueError(
            f"expert_mlp_terms: routing_weights are {shown(routing_weights)} and experts "
            f"{type(experts).__name__}: expected weights of experts, or RouterLogits and None"
        )
    if isinstance(experts, RouterLogits):
        x, experts = as_array("expert_mlp_terms: x", x), experts.read("expert_mlp_terms")
        # For few tokens, the first product's kernel can also choose the experts.
        is_tried = implementation is None and not is_batch_invariant()
        if is_tried and (found := _routed(x, mlp, experts)) is not None:
            inner, chosen, weights = found
            return grouped_matmul_terms(
                *(mlp.mixed(inner), mlp.down, chosen, experts.gained(chosen, weights)),
                bias=mlp.down_bias,
                activations=activations,
            )
        experts, routing_weights = experts.route()
    is_local = isinstance(experts, LocalExperts)
    x = as_array("expert_mlp_terms: x", x)
    experts = _read_experts(experts)
    routing_weights = as_array("expert_mlp_terms: routing_weights", routing_weights)
    configs = _joint_configs(x, mlp, experts, routing_weights, implementation)
    if configs is None:
        return _apart(activations, implementation, x, mlp, experts, routing_weights)
    if activations is not None:
        check_divided_rows("expert_mlp_terms", activations, mlp.down)
    first = Epilogue(mlp.gate_up_bias, mlp.gate)
    call = read_call("expert_mlp_terms", x, mlp.gate_up, experts, first)
    weights = routing_weights.reshape(call.experts.shape)
    if is_local:
        weights = jnp.where(call.experts >= 0, weights, 0)

    def reference(x: jax.Array, mlp: ExpertMLP, numbers: jax.Array, weights: jax.Array) -> Any:
        chosen = LocalExperts(numbers) if is_local else numbers
        return _apart(activations, "reference", x, mlp, chosen, weights).sum(0, keepdims=True)

    run = functools.partial(_by_warpgroups, configs, activations, is_local)
    terms = with_gradients_of(reference, run, call.x, mlp, call.experts, weights)
    return terms.reshape(len(terms), *call.tokens, terms.shape[-1])


def _read_experts(experts: jax.Array | LocalExperts) -> jax.Array | LocalExperts:
    """The experts, with their indices as an array."""
    if isinstance(experts, LocalExperts):
        numbers = as_array("expert_mlp_terms: experts", experts.numbers)
        return LocalExperts(numbers, experts.total)
    return as_array("expert_mlp_terms: experts", experts)


def _routed(x: jax.Array, mlp: ExpertMLP, logits: RouterLogits) -> Routed | None:
    """The results of a first product that chooses experts, or None if it can't."""
    return routed_products(x, mlp.gate_up, logits, mlp.gate, mlp.gate_up_bias)


def _apart(
    activations: DividedRows | None,
    implementation: Implementation | None,
    x: jax.Array,
    mlp: ExpertMLP,
    experts: jax.Array | LocalExperts,
    routing_weights: jax.Array,
) -> jax.Array:
    """The terms, by two separate products."""
    inner = grouped_matmul(
        *(x, mlp.gate_up, experts),
        bias=mlp.gate_up_bias,
        gate=mlp.gate,
        implementation=implementation,
    )
    return grouped_matmul_terms(
        *(mlp.mixed(inner), mlp.down, experts, routing_weights),
        bias=mlp.down_bias,
        activations=activations,
        implementation=implementation,
    )


def _joint_configs(
    x: Any,
    mlp: ExpertMLP,
    experts: jax.Array | LocalExperts,
    routing_weights: Any,
    implementation: str | None,
) -> Configs | None:
    """The configurations with which warpgroups run both products, or None if they don't."""
    numbers = experts.numbers if isinstance(experts, LocalExperts) else experts
    total = experts.total if isinstance(experts, LocalExperts) else None
    is_wanted = isinstance(implementation, str) and implementation == "mosaic"
    if not (implementation is None or is_wanted) or not _fits(x, mlp, numbers, routing_weights):
        return None
    chosen = numbers.size // numbers.shape[-1], numbers.shape[-1]
    problems = tuple(
        Problem.of(chosen, weight, gated=gated, total=total)
        for weight, gated in ((mlp.gate_up, True), (mlp.down, False))
    )
    for problem, weight in zip(problems, (mlp.gate_up, mlp.down), strict=True):
        if why_not("mosaic", problem, x, weight) is not None:
            return None
    return joint_configs_of(*problems, planned=implementation is None)


def _fits(x: Any, mlp: ExpertMLP, experts: Any, routing_weights: Any) -> bool:
    """Whether shapes fit; if not, the separate products raise the error.

    Also False if the second product permutes its channels differently for each expert.
    """
    first, second = mlp.gate_up, mlp.down
    kinds = jax.Array, QuantizedTensor
    if not (isinstance(first, kinds) and isinstance(second, kinds)):
        return False
    if len(first.shape) != 3 or len(second.shape) != 3:
        return False
    if isinstance(second, QuantizedTensor) and second.permutation is not None:
        return False
    inner, bias = first.shape[2] // 2, mlp.down_bias
    return bool(
        x.size > 0
        and experts.ndim
        and experts.shape[-1]
        and x.ndim == experts.ndim
        and routing_weights.shape == experts.shape
        and second.shape[:2] == (first.shape[0], inner)
        and (bias is None or bias.shape == (second.shape[0], second.shape[2]))
    )


def _by_warpgroups(
    configs: Configs,
    activations: DividedRows | None,
    is_local: bool,
    x: jax.Array,
    mlp: ExpertMLP,
    experts: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """One term float32 [1, tokens, N] for x [tokens, K], by two warpgroup kernels."""
    from mpjax.kernels.experts import warpgroups  # here, as importing it takes a while

    # If each expert rounds rows in its own way, they are written in the order of tiles immediately.
    is_apart = has_own_blocks(mlp.gate_up)
    rows, gate_up = (x, mlp.gate_up) if is_apart else in_packed_order(x, mlp.gate_up, experts, None)
    tiles = find_tiles(experts, gate_up.shape[0], configs[0], is_local=is_local)
    of_rows = jnp.repeat(tiles.expert, configs[0].tile_m)
    if is_apart:
        rows, gate_up = round_in_tiles(x, gate_up, tiles, of_rows)
    else:
        rows = warpgroups.in_tiles(rows, tiles)
    first = Epilogue(mlp.gate_up_bias, mlp.gate)
    inner = warpgroups.of_tiles(rows, gate_up, tiles, first, configs[0], x.dtype)
    inner, down = in_packed_order(mlp.mixed(inner), mlp.down, of_rows[:, None], activations)
    second = Epilogue(mlp.down_bias, None, weights)
    products = warpgroups.of_tiles(inner, down, tiles, second, configs[1], x.dtype)
    return warpgroups.of_tokens(products, tiles, experts.shape[1])[None]

"""Benchmark of the products of tokens with their experts, against the hit experts' bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.bench import measure, tables
from mpjax.kernels import (
    ExpertMLP,
    Gate,
    WeightFormat,
    expert_mlp_terms,
    grouped_matmul,
    grouped_matmul_terms,
    quantize,
)
from mpjax.kernels.experts.plans import Problem, plan_of
from mpjax.kernels.experts.shapes import AnyShape, ExpertMLPShape

CHECKED_TOKENS = 16  # tokens whose products are compared with the reference
MOST_BYTES = 8 * 10**9  # the most bytes of all stacks, which are on the device together
RAGGED_TOKENS = 64  # the most tokens for which XLA's slow ragged_dot is measured
COLUMNS: tables.Columns = {
    "format": "{format}",
    "tokens": "{M}",
    "hit": "{hit}",
    "µs": "{microseconds:.1f}",
    "GB/s": "{gigabytes_per_second:.0f}",
    "TFLOP/s": "{teraflops:.1f}",
    "× floor": "{times_floor:.2f}",
    "cuBLAS µs": "{cublas_microseconds:.1f}",
    "× cuBLAS": "{cublas_rate:.2f}",
    "ragged_dot µs": "{ragged_dot_microseconds:.1f}",
    "error": "{relative_error:.1e}",
    "as": "{implementation}",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: every weight format, number of tokens and shape.

    Raises ValueError for an unknown format and for numbers of tokens below 1.
    """

    shapes: tuple[AnyShape, ...]
    tokens: tuple[int, ...]
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        for text in self.formats:
            WeightFormat.parse(text)
        if min(self.tokens, default=0) < 1:
            raise ValueError(f"rows are {self.tokens}: expected one or more positive numbers")

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return len(self.shapes) * len(self.tokens) * len(self.formats)


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the figures derived from its measured times.

    TFLOP/s count 2·K·N operations for each pair of a token and an expert, GB/s the bytes of the
    hit experts. `cublas_rate` is the rate of operations relative to cuBLAS.
    """
    operations = 2 * row["M"] * row["per_token"] * row["K"] * row["N"]
    time = row["microseconds"]
    return dict(row) | {
        "teraflops": operations / time / 1e6,
        "gigabytes_per_second": row["hit_bytes"] / time / 1e3,
        "times_floor": time / row["floor_microseconds"],
        "cublas_rate": row["cublas_microseconds"] / time,
    }


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row whose error is NaN or not below the limit."""
    return measure.failures(rows, "{shape}, {format}, {M} tokens")


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep on the default device, and yields its row.

    A measured program computes several products, each with its own stack of experts, so that no
    expert is in the L2 cache. Tokens choose experts uniformly at random.
    """
    for shape in sweep.shapes:
        others = {tokens: _others(shape, tokens) for tokens in sweep.tokens}
        for text in sweep.formats:
            yield from _format(shape, text, sweep.tokens, others)


def random_experts(shape: AnyShape, tokens: int, seed: int) -> np.ndarray:
    """The distinct experts of each token, int32 [tokens, k]."""
    scores = np.random.default_rng(seed).random((tokens, shape.experts))
    return np.argsort(scores, -1)[:, : shape.per_token].astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_stack(key: jax.Array, shape: AnyShape, text: str) -> Any:
    """A normally distributed stack [experts, K, N], quantised; for an MLP, both of its stacks."""
    if isinstance(shape, ExpertMLPShape):
        keys = jax.random.split(key)
        pair = (
            random_stack(*each, text)
            for each in zip(keys, (shape.gate_up, shape.down), strict=True)
        )
        gate_up, down = pair
        return ExpertMLP(gate_up, down, shape.gate or Gate())
    dims = shape.experts, shape.channels, shape.outputs
    weight = jax.random.normal(key, dims, jnp.bfloat16) * jnp.bfloat16(shape.channels**-0.5)
    return quantize(weight, text)


def random_stacks(shape: AnyShape, text: str) -> list[Any]:
    """Random stacks, so many that one token's experts in all of them exceed the L2 cache.

    At least two, but otherwise at most MOST_BYTES.
    """
    like = jax.eval_shape(lambda: random_stack(jax.random.key(0), shape, text))
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    count = measure.copies(nbytes * shape.per_token // shape.experts)
    count = min(count, max(2, MOST_BYTES // nbytes))
    return [random_stack(key, shape, text) for key in jax.random.split(jax.random.key(0), count)]


def _format(
    shape: AnyShape, text: str, all_tokens: Sequence[int], others: Mapping[int, Any]
) -> Iterator[dict[str, Any]]:
    stacks = random_stacks(shape, text)
    count, nbytes = len(stacks), sum(leaf.nbytes for leaf in jax.tree.leaves(stacks[0]))
    product = functools.partial(layer_product, gate=shape.gate)
    for tokens in all_tokens:
        inputs = [random_inputs(shape, tokens, seed) for seed in range(count)]
        hit = [jnp.asarray(np.unique(chosen)) for _, chosen, _ in inputs]
        read = [
            jax.tree.map(lambda leaf, i=chosen: leaf[i], stack)
            for chosen, stack in zip(hit, stacks, strict=True)
        ]
        floor = measure.floor_microseconds(read)
        hit_bytes = np.mean([sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in read])
        del read
        each = measure.compiled(
            lambda inputs, stacks: list(map(product, inputs, stacks)), inputs, stacks
        )
        kernels = measure.merge_names(measure.kernel_microseconds(each, inputs, stacks), count)
        first = stacks[0].gate_up if isinstance(stacks[0], ExpertMLP) else stacks[0]
        problem = Problem.of((tokens, shape.per_token), first, gated=shape.gate is not None)
        plan = plan_of(problem)
        yield figures(
            {
                "shape": shape.name,
                "K": shape.channels,
                "N": shape.outputs,
                "experts": shape.experts,
                "per_token": shape.per_token,
                "M": tokens,
                "format": text,
                "implementation": plan.implementation,
                "configuration": plan.config and dataclasses.asdict(plan.config),
                "packed_bytes": nbytes,
                "hit": len(hit[0]),
                "hit_bytes": float(hit_bytes),
                "copies": count,
                "microseconds": sum(kernels.values()),
                "floor_microseconds": floor,
                **others[tokens],
                "relative_error": mean_error(each(inputs, stacks)[0], inputs[0], stacks[0], shape),
                "kernel_microseconds": kernels,
            }
        )


Inputs = tuple[jax.Array, jax.Array, jax.Array]  # x, the experts, and the routing weights


def random_inputs(shape: AnyShape, tokens: int, seed: int) -> Inputs:
    """x, experts and routing weights; without a gate, each pair has its own row of x."""
    keys = jax.random.split(jax.random.key(seed + 1))
    pairs = () if shape.gate is not None else (shape.per_token,)
    x = jax.random.normal(keys[0], (tokens, *pairs, shape.channels), jnp.bfloat16)
    weights = jax.random.uniform(keys[1], (tokens, shape.per_token))
    return x, jnp.asarray(random_experts(shape, tokens, seed)), weights


def layer_product(inputs: Inputs, stack: Any, *, gate: Any) -> jax.Array:
    """The product as a layer computes it: gated, or as terms that the next norm adds.

    stack: of matrices, or both stacks of an MLP.
    """
    x, chosen, weights = inputs
    if isinstance(stack, ExpertMLP):
        return expert_mlp_terms(x, stack, chosen, weights)
    if gate is not None:
        return grouped_matmul(x, stack, chosen, gate=gate)
    return grouped_matmul_terms(x, stack, chosen, weights)


def _others(shape: AnyShape, tokens: int) -> dict[str, float | None]:
    """The times in bfloat16 of one cuBLAS product with as many rows, and of XLA's `ragged_dot`.

    `ragged_dot` gets 16-bit experts and sorted rows. For an MLP, cuBLAS's times of both products
    are added, and `ragged_dot` is not measured.
    """
    if isinstance(shape, ExpertMLPShape):
        both = [
            _others(each, tokens)["cublas_microseconds"] or 0.0
            for each in (shape.gate_up, shape.down)
        ]
        return {"cublas_microseconds": sum(both), "ragged_dot_microseconds": None}
    pairs = tokens * shape.per_token
    keys = jax.random.split(jax.random.key(0), 2)
    rows = jax.random.normal(keys[0], (pairs, shape.channels), jnp.bfloat16)
    count = measure.copies(2 * shape.channels * shape.outputs)
    matrices = [
        jax.random.normal(key, (shape.channels, shape.outputs), jnp.bfloat16)
        for key in jax.random.split(keys[1], count)
    ]
    dense = jax.jit(lambda rows, matrices: [rows @ matrix for matrix in matrices])
    found: dict[str, float | None] = {
        "cublas_microseconds": measure.microseconds(dense, rows, matrices) / count,
        "ragged_dot_microseconds": None,
    }
    if tokens <= RAGGED_TOKENS:
        stack = random_stack(keys[1], shape, "bfloat16")
        sizes = np.bincount(random_experts(shape, tokens, 0).reshape(-1), minlength=shape.experts)
        found["ragged_dot_microseconds"] = measure.microseconds(
            jax.jit(jax.lax.ragged_dot), rows, stack, jnp.asarray(sizes, jnp.int32)
        )
    return found


def mean_error(product: jax.Array, inputs: Inputs, stack: Any, shape: AnyShape) -> float:
    """Mean error over mean magnitude of the first tokens' products, against the reference."""
    x, chosen, weights = (array[:CHECKED_TOKENS] for array in inputs)
    if isinstance(stack, ExpertMLP):
        arguments = x.astype(jnp.float32), stack, chosen, weights
        exact = jax.jit(functools.partial(expert_mlp_terms, implementation="reference"))(*arguments)
        return measure.relative_error(product.sum(0)[:CHECKED_TOKENS], exact.sum(0))
    reference = functools.partial(
        grouped_matmul, x.astype(jnp.float32), stack, chosen, implementation="reference"
    )
    if shape.gate is not None:
        exact, found = jax.jit(lambda: reference(gate=shape.gate))(), product[:CHECKED_TOKENS]
    else:
        exact = jax.jit(lambda: reference(routing_weights=weights))()
        found = product.sum(0)[:CHECKED_TOKENS]
    return measure.relative_error(found, exact)

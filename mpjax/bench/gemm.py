"""Benchmark of products with packed weights, against their memory floor and cuBLAS."""

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
    QuantizedActivations,
    QuantizedTensor,
    WeightFormat,
    matmul,
    matmul_terms,
    quantize,
    quantize_activations,
)
from mpjax.kernels.gemm import plans
from mpjax.kernels.gemm.plans import Implementation, Problem, TritonConfig, WarpgroupConfig
from mpjax.kernels.gemm.shapes import GemmShape

CHECKED_ROWS = 64  # rows of a product that are compared with the reference
PRODUCT_BYTES = 2_000_000_000  # the most bytes of the outputs of one call
COLUMNS: tables.Columns = {
    "format": "{format}",
    "M": "{M}",
    "µs": "{microseconds:.1f}",
    "GB/s": "{gigabytes_per_second:.0f}",
    "TFLOP/s": "{teraflops:.1f}",
    "× floor": "{times_floor:.2f}",
    "cuBLAS µs": "{cublas_microseconds:.1f}",
    "speed-up": "{speedup:.2f}",
    "error": "{relative_error:.1e}",
    "as": "{implementation}",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: every weight format, number of rows and shape.

    implementation: forced for the packed weights; None lets `matmul` choose.
    in_model: whether to leave out the work of other kernels in a model: x is quantised beforehand,
        as with `rounded`, and splits are not added, because the next kernel adds them.
    rounded: whether x is quantised before the measurement if the format has 8-bit activations, as a
        norm or a gate does in a model.

    Raises ValueError for an unknown format, a format that is not packed, and rows below 1.
    """

    shapes: tuple[GemmShape, ...]
    rows: tuple[int, ...]
    formats: tuple[str, ...]
    implementation: Implementation | None = None
    in_model: bool = False
    rounded: bool = False

    def __post_init__(self) -> None:
        for text in self.formats:
            if not WeightFormat.parse(text).is_packed:
                raise ValueError(f"{text} is not packed: cuBLAS, beside every format, measures it")
        if min(self.rows, default=0) < 1:
            raise ValueError(f"rows are {self.rows}: expected one or more positive numbers")

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return len(self.shapes) * len(self.rows) * len(self.formats)


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the figures derived from its measured times.

    TFLOP/s count 2·M·K·N operations. GB/s count the bytes of the packed weight, and of x and the
    product in 16 bits; they are left out if the row lacks the bytes of its weight.
    """
    rows, channels, outputs = row["M"], row["K"], row["N"]
    time = row["microseconds"]
    derived = {
        "teraflops": 2 * rows * channels * outputs / time / 1e6,
        "times_floor": time / row["floor_microseconds"],
        "cublas_teraflops": 2 * rows * channels * outputs / row["cublas_microseconds"] / 1e6,
        "speedup": row["cublas_microseconds"] / time,
    }
    if "packed_bytes" in row:
        nbytes = row["packed_bytes"] + 2 * rows * (channels + outputs)
        derived["gigabytes_per_second"] = nbytes / time / 1e3
    return dict(row) | derived


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row whose error is NaN or not below the limit."""
    return measure.failures(rows, "{shape}, {format}, M = {M}")


def choice(rows: int, weight: QuantizedTensor, forced: Implementation | None) -> dict[str, Any]:
    """The implementation of a product with `rows` rows, and its configuration, for a result row.

    The configuration is None if the implementation is not a fused kernel; also for `dequantize`
    with liquid4, although an int8 kernel then multiplies the decoded weight.
    """
    problem = Problem.of(rows, weight)
    name = forced or plans.plan_of(problem).implementation
    config: TritonConfig | WarpgroupConfig | None = None
    if name == "triton":
        config = plans.triton_config_of(problem)
    elif name == "mosaic":
        config = plans.warpgroup_config_of(problem)
    return {
        "implementation": name,
        "configuration": None if config is None else dataclasses.asdict(config),
    }


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep on the default device, and yields its row.

    A measured program computes several products, each with its own weight and x, so that no weight
    is in the L2 cache and XLA can't merge products. The memory holds the weights of one shape and
    format, and their products.
    """
    for shape in sweep.shapes:
        cublas = _cublas(shape, sweep.rows)
        for text in sweep.formats:
            yield from _format(shape, text, sweep, cublas)


def copies(shape: GemmShape, rows: int, nbytes: int) -> int:
    """The number of products in a call, for a weight of `nbytes`; fewer if outputs are large."""
    products = PRODUCT_BYTES // (2 * rows * shape.outputs)
    return max(2, min(measure.copies(nbytes), products))


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_weight(
    key: jax.Array, shape: GemmShape, format: WeightFormat | None = None
) -> QuantizedTensor | jax.Array:
    """A normally distributed matrix [K, N], quantised to `format`, or bfloat16 without a format."""
    dims = (shape.channels, shape.outputs)
    # With this deviation, outputs are as large as x, and scales are not subnormal in float16.
    weight = jax.random.normal(key, dims, jnp.bfloat16) * jnp.bfloat16(shape.channels**-0.5)
    return weight if format is None else quantize(weight, format)


def _cublas(shape: GemmShape, all_rows: tuple[int, ...]) -> dict[int, float]:
    """Microseconds of the bfloat16 product, for each number of rows."""
    nbytes = 2 * shape.channels * shape.outputs
    keys = jax.random.split(jax.random.key(0), measure.copies(nbytes))
    weights = [random_weight(key, shape) for key in keys]
    each = jax.jit(lambda xs, weights: list(map(jnp.dot, xs, weights)))
    times = {}
    for rows in all_rows:
        count = copies(shape, rows, nbytes)
        xs = _activations(shape, rows, count)
        times[rows] = measure.microseconds(each, xs, weights[:count]) / count
    return times


def _format(
    shape: GemmShape, text: str, sweep: Sweep, cublas: Mapping[int, float]
) -> Iterator[dict[str, Any]]:
    format = WeightFormat.parse(text)
    like = jax.eval_shape(lambda: random_weight(jax.random.key(0), shape, format))
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(like))
    keys = jax.random.split(jax.random.key(0), measure.copies(nbytes))
    weights = [random_weight(key, shape, format) for key in keys]
    floor = measure.floor_microseconds(weights)
    multiply = matmul_terms if sweep.in_model else matmul
    is_rounded = (sweep.in_model or sweep.rounded) and format.operand is not None

    def product(x: Any, weight: QuantizedTensor) -> jax.Array:
        if is_rounded and format.codes == "int4":
            x = _transposed(x)  # undoes that of `_rounded`, within the measured program
        return multiply(x, weight, implementation=sweep.implementation)

    for rows in sweep.rows:
        count = copies(shape, rows, nbytes)
        xs = _activations(shape, rows, count)
        given: list[Any] = [_rounded(x, format) for x in xs] if is_rounded else xs
        arguments = (given, weights[:count])
        each = measure.compiled(lambda xs, weights: list(map(product, xs, weights)), *arguments)
        times = measure.kernel_microseconds(each, *arguments)
        kernels = measure.merge_names(times, calls=count)
        first = each(*arguments)[0]
        first = first.sum(0) if sweep.in_model else first
        yield figures(
            {
                "shape": shape.name,
                "K": shape.channels,
                "N": shape.outputs,
                "M": rows,
                "format": text,
                "forced": sweep.implementation,
                "in_model": sweep.in_model,
                "rounded": sweep.rounded,
                **choice(rows, weights[0], sweep.implementation),
                "packed_bytes": nbytes,
                "copies": count,
                "microseconds": sum(kernels.values()),
                "floor_microseconds": floor,
                "cublas_microseconds": cublas[rows],
                "relative_error": _error(first, xs[0], weights[0]),
                "kernel_microseconds": kernels,
            }
        )


def _rounded(x: jax.Array, format: WeightFormat) -> QuantizedActivations:
    """Rounds x, in the memory layout of a model: for `int4`, scales are [groups, M]."""
    found = quantize_activations(x, format)
    return _transposed(found) if format.codes == "int4" else found


def _transposed(x: QuantizedActivations) -> QuantizedActivations:
    return dataclasses.replace(x, scales=x.scales.T)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, rows: int, channels: int) -> jax.Array:
    return jax.random.normal(key, (rows, channels), jnp.bfloat16)


def _activations(shape: GemmShape, rows: int, count: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(1), count)
    return [_normal(key, rows, shape.channels) for key in keys]


@jax.jit
def _reference(x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    return matmul(x.astype(jnp.float32), weight, implementation="reference")


def _error(product: jax.Array, x: jax.Array, weight: QuantizedTensor) -> float:
    """The relative error of CHECKED_ROWS rows of a product, evenly spread over x."""
    chosen = np.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECKED_ROWS)).astype(int)
    return measure.relative_error(product[chosen], _reference(x[chosen], weight))

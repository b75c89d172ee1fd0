"""Products of sharded weights on four devices, against those of whole ones.

It needs a process of its own: `python -m tests.pallas_kernels.sharded_products`, with
XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax.kernels import (
    ActivationFormat,
    DividedRows,
    QuantizedActivations,
    matmul,
    partition_specs,
    quantize,
)
from mpjax.kernels.activations import quantize_activations

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)
CHANNELS, OUTPUTS = 1024, 24  # two of the largest blocks
# One of each kind of codes and of each layout of words and of parameters.
FORMATS = (
    *("uint4:g128", "uint4:gK:sym", "table3:g64", "float8:g128", "int8:gK/int8"),
    *("liquid4:g64/int8", "float8:gK/float8", "float8:g128/float8"),
)


def activations_specs(x: jax.Array | QuantizedActivations):
    """The specs of x [M, K], whose channels are divided; every device has the scales of rows."""
    if isinstance(x, jax.Array):
        return PartitionSpec(None, "k")
    scales = PartitionSpec(None, "k" if x.scales.shape[1] > 1 else None)
    return QuantizedActivations(PartitionSpec(None, "k"), scales, x.dtype)  # type: ignore[arg-type]


def check(text: str, mesh: jax.sharding.Mesh, *axes: tuple[str | None, str | None]) -> None:
    """With K and N divided along each of some pairs of axes, of which None divides none."""
    rng = np.random.default_rng(0)
    weight = quantize(jnp.asarray(rng.standard_normal((CHANNELS, OUTPUTS)), jnp.float32), text)
    x = jnp.asarray(rng.standard_normal((3, CHANNELS)), jnp.float32)
    if weight.format.operand:  # once for all shards, so that they multiply the same numbers
        x = quantize_activations(x, weight.format)
    expected = np.asarray(jax.jit(matmul)(x, weight))
    for k, n in axes:
        specs = partition_specs(weight, mesh, k=k, n=n)
        shape = CHANNELS // (2 if k else 1), OUTPUTS // (2 if n else 1)

        def product(x, weight, k=k, shape=shape):
            assert (weight.shape, weight.padding) == (shape, 0)
            found = matmul(x, weight)
            return found if k is None else jax.lax.psum(found, k)

        of_x = PartitionSpec() if k is None else activations_specs(x)
        run = jax.shard_map(
            product, mesh=mesh, in_specs=(of_x, specs), out_specs=PartitionSpec(None, n)
        )
        placed = jax.device_put(weight, jax.tree.map(lambda s: NamedSharding(mesh, s), specs))
        shards = weight.words.size // placed.words.addressable_shards[0].data.size
        assert shards == (2 if k else 1) * (2 if n else 1)
        found = jax.jit(run)(x, placed)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3, err_msg=f"{text} {k} {n}")


def check_experts(mesh: jax.sharding.Mesh) -> None:
    """Four experts on two devices, each divided along N."""
    rng = np.random.default_rng(1)
    weight = quantize(jnp.asarray(rng.standard_normal((4, 256, OUTPUTS)), jnp.float32), "uint4:g64")
    x = jnp.asarray(rng.standard_normal((4, 3, 256)), jnp.float32)
    specs = partition_specs(weight, mesh, n="n", leading=("k",))

    def product(x, weight):
        assert weight.shape == (2, 256, OUTPUTS // 2)
        return jax.vmap(matmul)(x, weight)

    out = PartitionSpec("k", None, "n")
    run = jax.shard_map(product, mesh=mesh, in_specs=(PartitionSpec("k"), specs), out_specs=out)
    np.testing.assert_allclose(jax.jit(run)(x, weight), jax.vmap(matmul)(x, weight), rtol=1e-4)


def check_divided_rows(mesh: jax.sharding.Mesh) -> None:
    """Parts of rows are rounded to the codes and by the scales of the whole rows."""
    x = np.random.default_rng(2).standard_normal((5, 256)).astype(np.float32)
    x[1, :128], x[2] = 0, 0
    x[3, 7], x[4, 200] = np.nan, np.inf
    for format in (ActivationFormat("int8"), ActivationFormat("float8")):
        rows = DividedRows(format, "k")
        run = jax.shard_map(
            lambda x, rows=rows: quantize_activations(x, rows),
            mesh=mesh,
            in_specs=PartitionSpec(None, "k"),
            out_specs=QuantizedActivations(PartitionSpec(None, "k"), PartitionSpec(), "float32"),  # type: ignore[arg-type]
        )
        expected, found = quantize_activations(x, format), jax.jit(run)(x)
        assert np.isnan(np.asarray(found.scales)[3:]).all()
        np.testing.assert_array_equal(found.scales, expected.scales)
        np.testing.assert_array_equal(found.values[:3], expected.values[:3])


if __name__ == "__main__":
    MESH = jax.make_mesh((2, 2), ("k", "n"), axis_types=(AxisType.Auto, AxisType.Auto))
    for each in FORMATS:
        check(each, MESH, ("k", "n"))
    check("uint4:g128", MESH, ("k", None), (None, "n"))
    check_experts(MESH)
    check_divided_rows(MESH)
    print(f"{len(FORMATS)} formats and experts on {MESH.size} devices")

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, backend, manual_axes, matmul
from tests.pallas_kernels.gemm.weights import random_weight
from tests.pallas_kernels.oracles import random_array

DIVIDED, WHOLE = jax.P("row"), jax.P()


def mapped(function, *in_specs, out_specs):
    mesh = jax.make_mesh((1,), ("row",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def varies(array):
    return "row" in jax.typeof(array).manual_axis_type.varying


@pytest.mark.parametrize("spec", [DIVIDED, WHOLE])
def test_all_vary_where_one_does(spec):
    found = []

    def function(x, y):
        tree = manual_axes.vary_alike({"x": x, "y": [y, None]})
        shapes = {"z": jax.ShapeDtypeStruct((3,), jnp.int8)}
        found.extend(map(varies, jax.tree.leaves(tree)))
        found.append(manual_axes.like(shapes, tree)["z"].manual_axis_type)
        return tree["x"]

    mapped(function, spec, WHOLE, out_specs=spec)(jnp.ones(2), jnp.ones(2, jnp.int32))
    assert found[:2] == [spec == DIVIDED] * 2
    assert (found[2] is not None and "row" in found[2].varying) == (spec == DIVIDED)


def test_elsewhere_nothing_changes():
    tree = (np.ones(2), None, jnp.ones(3))
    assert manual_axes.vary_alike(tree) is tree
    assert manual_axes.like(tree, tree) is tree
    assert manual_axes.vary_alike(()) == ()
    assert manual_axes.like("shapes", ()) == "shapes"


def test_a_kernel_varies_like_its_arguments():
    def multiply(x_ref, factor_ref, out_ref):
        index = jnp.arange(16)
        out_ref[index] = x_ref[index] * factor_ref[index]

    def run(x, factor):
        return backend.pallas_call(
            multiply,
            x,
            factor,
            out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
            grid=(1,),
            name="multiply",
            warps=1,
            stages=1,
            interpret=False,
        )

    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    mesh = jax.sharding.AbstractMesh((1,), ("row",), axis_types=(jax.sharding.AxisType.Auto,))
    map_over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(DIVIDED, WHOLE))
    assert jax.eval_shape(map_over(run, out_specs=DIVIDED), x, x).shape == (16,)
    with pytest.raises(ValueError, match=r"replication|out_specs"):
        jax.eval_shape(map_over(run, out_specs=WHOLE), x, x)


def test_derivatives_of_what_does_not_vary_are_sums(rng):
    weight = random_weight(rng, "uint4:g32", 64, 24)
    x, scales = random_array(rng, (4, 64), "float32"), weight.scales()[:2].astype(jnp.float32)

    def of_scales(x, scales, weight):
        return jax.grad(lambda s: matmul(x, weight, scales=s).sum())(scales)

    run = mapped(of_scales, DIVIDED, WHOLE, WHOLE, out_specs=WHOLE)
    np.testing.assert_allclose(run(x, scales, weight), of_scales(x, scales, weight), rtol=1e-5)

    def of_norm(terms, residual, norm):
        return jax.grad(lambda g: add_rms_norm(terms, residual, g, 1e-6)[1].sum())(norm)

    run = mapped(of_norm, jax.P(None, "row"), DIVIDED, WHOLE, out_specs=WHOLE)
    arguments = random_array(rng, (2, 4, 64), "float32"), x, jnp.ones(64)
    np.testing.assert_allclose(run(*arguments), of_norm(*arguments), rtol=1e-5)

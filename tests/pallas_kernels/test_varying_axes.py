from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import add_rms_norm, matmul, varying_axes
from mpjax.kernels.launch import Settings, launch
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
        tree = varying_axes.vary_alike({"x": x, "y": [y, None]})
        shapes = {"z": jax.ShapeDtypeStruct((3,), jnp.int8)}
        found.extend(map(varies, jax.tree.leaves(tree)))
        found.append(varying_axes.varying_like(shapes, tree)["z"].manual_axis_type)
        return tree["x"]

    mapped(function, spec, WHOLE, out_specs=spec)(jnp.ones(2), jnp.ones(2, jnp.int32))
    assert found[:2] == [spec == DIVIDED] * 2
    assert (found[2] is not None and "row" in found[2].varying) == (spec == DIVIDED)


def test_elsewhere_nothing_changes():
    tree = (np.ones(2), None, jnp.ones(3))
    assert varying_axes.vary_alike(tree) is tree
    assert varying_axes.varying_like(tree, tree) is tree
    assert varying_axes.vary_alike(()) == ()
    assert varying_axes.varying_like("shapes", ()) == "shapes"


def test_a_kernel_varies_like_its_arguments():
    def multiply(x_ref, factor_ref, out_ref):
        index = jnp.arange(16)
        out_ref[index] = x_ref[index] * factor_ref[index]

    def run(x, factor):
        return launch(
            multiply,
            x,
            factor,
            out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
            grid=(1,),
            settings=Settings("multiply"),
            interpret=False,
        )

    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    mesh = jax.sharding.AbstractMesh((1,), ("row",), axis_types=(jax.sharding.AxisType.Auto,))
    map_over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(DIVIDED, WHOLE))
    assert jax.eval_shape(map_over(run, out_specs=DIVIDED), x, x).shape == (16,)
    with pytest.raises(ValueError, match=r"replication|out_specs"):
        jax.eval_shape(map_over(run, out_specs=WHOLE), x, x)


def test_the_derivative_of_scales_that_do_not_vary_is_a_sum(rng):
    weight = random_weight(rng, "uint4:g32", 64, 24)
    x, scales = random_array(rng, (4, 64), "float32"), weight.scales()[:2].astype(jnp.float32)

    def derivative(x, scales, weight):
        return jax.grad(lambda s: matmul(x, weight, scales=s).sum())(scales)

    run = mapped(derivative, DIVIDED, WHOLE, WHOLE, out_specs=WHOLE)
    assert "psum" in str(jax.make_jaxpr(run)(x, scales, weight))
    np.testing.assert_allclose(run(x, scales, weight), derivative(x, scales, weight), rtol=1e-5)


def test_the_derivative_of_a_norm_that_does_not_vary_is_a_sum(pretend_gpu):
    def derivative(terms, residual, norm):
        def loss(norm):
            return add_rms_norm(terms, residual, norm, 1e-6)[1].astype(jnp.float32).sum()

        return jax.grad(loss)(norm)

    run = mapped(derivative, jax.P(None, "row"), DIVIDED, WHOLE, out_specs=WHOLE)
    terms, residual = jnp.zeros((2, 4, 64)), jnp.zeros((4, 64), jnp.bfloat16)
    assert "psum" in str(jax.make_jaxpr(run)(terms, residual, jnp.ones(64, jnp.bfloat16)))

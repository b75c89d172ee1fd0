"""Launches of kernels: registers, PTX, mesh axes, derivatives."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import add_rms_norm, device, matmul
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.launch import (
    Settings,
    first_program_id,
    launch,
    store,
)
from mpjax.kernels.optimized_once import optimized_once
from tests.pallas_kernels.gemm.weights import random_weight
from tests.pallas_kernels.oracles import random_array


@pytest.mark.parametrize("capability", [None, 8.0, 9.0])
def test_kernels_let_the_next_one_be_launched_early(capability, lower_for_cuda):
    def kernel(out_ref):
        index = first_program_id()
        store(out_ref.at[index + jnp.arange(1)], jnp.full(1, index))

    def numbers(interpret: bool) -> jax.Array:
        return launch(
            kernel,
            out_shape=jax.ShapeDtypeStruct((3,), jnp.int32),
            grid=(3,),
            settings=Settings("numbers"),
            interpret=interpret,
        )

    with device.described_as(compute_capability=capability):
        module = lower_for_cuda(jax.jit(lambda: numbers(interpret=False)))
    assert ("griddepcontrol.launch_dependents" in module) == (capability == 9.0)
    np.testing.assert_array_equal(numbers(interpret=True), [0, 1, 2])


def test_no_kernel_forgets_the_next_one():
    package = Path(device.__file__).parent
    texts = {
        path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")
    }
    assert [name for name, text in texts.items() if "program_id(0)" in text] == ["target.py"]
    for name, text in texts.items():
        if "from mpjax.kernels.launch import" in text:
            launches = re.findall(r"(?<!def )\blaunch\(", text)
            # A tile of W4Ax's blocks asks for it, and a row of a norm.
            ways = "first_program_id()", "= Tile.of(", "= triton.row_of("
            asked = sum(map(text.count, ways))
            assert len(launches) <= asked, name


DIVIDED, WHOLE = jax.P("row"), jax.P()


def mapped(function, *in_specs, out_specs):
    mesh = jax.make_mesh((1,), ("row",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


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


@optimized_once("power")
def _raised(x: jax.Array, *, power: int) -> jax.Array:
    return jnp.tanh(x) ** power


def _twice(x: jax.Array) -> jax.Array:
    return _raised(_raised(x, power=3), power=3)


@pytest.mark.skipif(not hasattr(jax, "Inline"), reason="JAX 0.12 has it")
def test_alike_calls_are_one_function_on_a_cpu_alone():
    x = jnp.linspace(0.0, 1, 5)
    text = jax.jit(_twice).lower(x).as_text()
    assert text.count("stablehlo.tanh") == 1
    assert text.count("call @_raised") == 2
    with device.described_as():
        text = jax.jit(lambda x: _twice(x)).lower(x).as_text()
    assert (text.count("stablehlo.tanh"), text.count("call @_raised")) == (2, 0)
    np.testing.assert_allclose(jax.jit(_twice)(x), jnp.tanh(jnp.tanh(x) ** 3) ** 3, rtol=1e-6)


@pytest.mark.any_version
def test_values_are_the_kernels_and_derivatives_the_references():
    def run(x, y):
        return with_gradients_of(lambda x, y: x * y, lambda x, y: jnp.float32(7.0), x, y)

    value, gradients = jax.value_and_grad(run, (0, 1))(jnp.float32(2.0), jnp.float32(3.0))
    assert value == 7.0
    assert gradients == (3.0, 2.0)


@pytest.mark.any_version
def test_arrays_in_a_tree_beside_integers_have_derivatives():
    def run(x: jax.Array, numbers: jax.Array, tree: dict[str, jax.Array]) -> jax.Array:
        return jnp.zeros_like(x)

    def reference(x: jax.Array, numbers: jax.Array, tree: dict[str, jax.Array]) -> jax.Array:
        return x[numbers] * tree["y"]

    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return with_gradients_of(reference, run, x, jnp.array([1, 1]), {"y": y}).sum()

    x, y = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    assert loss(x, y) == 0
    slopes = jax.grad(loss, (0, 1))(x, y)
    np.testing.assert_array_equal(slopes[0], [0, 12])
    np.testing.assert_array_equal(slopes[1], [3, 3])


@pytest.mark.any_version
def test_terms_have_the_derivatives_of_their_sum():
    def split(x: jax.Array) -> jax.Array:
        return jnp.stack([x / 4, x / 2, x / 4]).astype(jnp.bfloat16)

    def loss(x: jax.Array) -> jax.Array:
        terms = with_gradients_of(lambda x: x**2, split, x)
        return (terms.sum(0) * jnp.bfloat16(2)).sum()

    slope = jax.grad(loss)(jnp.array([2.0, 3.0]))
    np.testing.assert_array_equal(slope, [8, 12])

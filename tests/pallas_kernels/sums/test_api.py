from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mpjax.kernels import UnsupportedError, sum_over_devices
from mpjax.kernels.plans.plan import Plan
from mpjax.kernels.sums import api, peer
from mpjax.kernels.sums.plans import forced


def over(devices, function, x):
    """A function of each row of x, on the device that has the row."""
    mesh = jax.sharding.Mesh(np.array(devices), ("model",))
    rows = PartitionSpec("model")
    run = jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(run)(x)


def rows_of(devices: int, *shape: int) -> jax.Array:
    noise = np.random.default_rng(0).standard_normal((devices, *shape))
    return jnp.asarray(noise, jnp.float32)


ONE = jax.devices()[:1]


def test_the_default_is_xlas_sum_until_a_plan_has_the_kernel(pretend_gpu):
    def traced(x):
        return str(
            jax.make_jaxpr(lambda x: over(ONE, lambda x: sum_over_devices(x, "model"), x))(x)
        )

    assert "psum" in traced(rows_of(1, 4))
    with forced(Plan("mosaic")):
        assert "peer_sum" in traced(rows_of(1, 4))
        assert "peer_sum" not in traced(rows_of(1, 4).astype("bfloat16"))  # which it can't add


@pytest.mark.parametrize(
    ("x", "axis", "message"),
    [
        ("x", "model", "sum_over_devices: x is 'x': expected an array"),
        (jnp.ones(2, jnp.int32), "model", "x has the dtype int32: expected floating"),
        (jnp.ones(2), 0, "axis is 0: expected a mesh axis's name"),
        (jnp.ones(2), "other", "there is no mesh axis 'other' here: call it under shard_map"),
    ],
)
def test_arguments_that_do_not_fit(x, axis, message):
    with pytest.raises(ValueError, match=message):
        over(ONE, lambda _: sum_over_devices(x, axis), rows_of(1, 2))


def test_the_kernel_says_why_it_can_not_run():
    def run(x):
        return sum_over_devices(x, "model", implementation="mosaic")

    with pytest.raises(UnsupportedError, match="'mosaic' can't run: the default device is 'cpu'"):
        over(ONE, run, rows_of(1, 2))


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (jnp.ones(4, jnp.bfloat16), "x is bfloat16, expected float32"),
        (jax.ShapeDtypeStruct((1 << 20,), jnp.float32), "x has 4194304 bytes, expected 1 to"),
        (jnp.ones(4), r"the mesh has the axes \(\), expected 'model' alone"),
    ],
)
def test_sums_that_the_kernel_does_not_have(x, reason, pretend_gpu, monkeypatch):
    if "axes" not in reason:
        mesh = jax.sharding.AbstractMesh((1,), ("model",))
        monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert re.match(reason, api._why_not_mosaic(x, "model"))


class Mesh(jax.sharding.Mesh):
    """A mesh that says to have other devices."""

    devices = property(lambda self: np.array([types.SimpleNamespace(id=1)]))


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        (None, "it needs the mesh of shard_map, to check its devices: pass mesh"),
        (
            object.__new__(Mesh),
            r"the mesh has the devices \[1\], expected the first of jax.devices",
        ),
    ],
)
def test_the_kernel_runs_on_the_first_devices_alone(mesh, reason, monkeypatch):
    monkeypatch.setattr(api, "_why_not_mosaic", lambda x, axis: None)

    def run(x):
        return sum_over_devices(x, "model", mesh=mesh, implementation="mosaic")

    with pytest.raises(UnsupportedError, match=f"'mosaic' can't run: {reason}"):
        over(ONE, run, rows_of(1, 2))
    assert api._why_not_of(jax.sharding.Mesh(np.array(ONE), ("model",)), is_needed=True) is None


def test_the_derivative_is_a_sum(monkeypatch):
    monkeypatch.setattr(api, "_why_not_mosaic", lambda x, axis: None)
    monkeypatch.setattr(peer, "peer_sum", lambda x, axis, devices: jnp.full_like(x, 3))
    mesh = jax.sharding.Mesh(np.array(ONE), ("model",))

    def slope(x, implementation):
        def loss(x):
            found = sum_over_devices(x, "model", mesh=mesh, implementation=implementation)
            return (found * jnp.arange(3.0)[None]).sum()

        return jax.grad(loss)(x)

    found, expected = (
        over(ONE, functools.partial(slope, implementation=name), rows_of(1, 3))
        for name in ("mosaic", "reference")
    )
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found.ravel(), [0, 1, 2])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4096), (3, 2880), (64, 8192)])
def test_on_several_gpus(shape):
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("one GPU has no other to add to")
    x = rows_of(len(devices), *shape)
    kernel = {"mesh": jax.sharding.Mesh(np.array(devices), ("model",)), "implementation": "mosaic"}

    def run(x):
        total = x
        for _ in range(5):  # one sum after the other, whose inboxes share memory
            total = sum_over_devices(total, "model", **kernel) / len(devices) + x
        return total

    def expected(x):
        total = x
        for _ in range(5):
            total = jax.lax.psum(total, "model") / len(devices) + x
        return total

    found = over(devices, run, x)
    np.testing.assert_allclose(found, over(devices, expected, x), rtol=1e-5, atol=1e-5)
    once = over(devices, lambda x: sum_over_devices(x, "model", **kernel), x)
    for row in once[1:]:
        np.testing.assert_array_equal(row, once[0])

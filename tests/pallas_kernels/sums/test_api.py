from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mpjax.kernels import UnsupportedError, open_inbox, sum_over_devices
from mpjax.kernels.sums.api import LEAST_VERSION

ONE = jax.sharding.Mesh(jax.devices()[:1], ("model",))
SUPPORTED = pytest.mark.skipif(
    jax.__version_info__ < LEAST_VERSION, reason="JAX's kernels take no references yet"
)


def over(mesh, function):
    return jax.shard_map(
        function, mesh=mesh, in_specs=P("model"), out_specs=P("model"), check_vma=False
    )


def lowered(function, devices: int, x: jax.ShapeDtypeStruct) -> str:
    """A function of the rows of x, each on one of some H200s of a host."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((devices,), ("model",), abstract_device=device)
    sharding = jax.sharding.NamedSharding(mesh, P("model"))
    x = jax.ShapeDtypeStruct((devices, *x.shape), x.dtype, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(over(mesh, function)).trace(x)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@SUPPORTED
@pytest.mark.parametrize(("devices", "dtype", "terms"), [(2, "float32", 2), (8, "bfloat16", 1)])
def test_sums_in_a_loop_share_an_inbox_that_is_not_copied(pretend_gpu, devices, dtype, terms):
    def run(x):
        inbox = open_inbox("model", 4096)
        add = functools.partial(sum_over_devices, axis="model", inbox=inbox, has_terms=True)
        return jax.lax.fori_loop(0, 9, lambda _, x: x * 0.5 + add(add(x) * x), x[0])[None]

    text = lowered(run, devices, jax.ShapeDtypeStruct((terms, 1000), dtype))
    calls = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert len(calls) == 3, "two for the addresses, and one for all sums, which is called"
    assert all("operand_index = " in call for call in calls), "each writes to the inbox in place"
    assert all("uses_xla_collective_metadata = false" in call for call in calls)
    assert text.count("stablehlo.all_gather") == 1
    assert "all_reduce" not in text


@SUPPORTED
@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (jax.ShapeDtypeStruct((1, 8), jnp.float16), "x is float16: expected float32 or bfloat16"),
        (jax.ShapeDtypeStruct((1, 1024), jnp.float32), "a sum has 4096 bytes: expected 1 to 1024"),
    ],
)
def test_other_sums_are_those_of_xla(pretend_gpu, x, reason):
    def run(x, **options):
        return sum_over_devices(x, "model", open_inbox("model", 1024), **options)

    assert "all_reduce" in lowered(run, 2, x)
    with pytest.raises(UnsupportedError, match=reason):
        lowered(functools.partial(run, implementation="mosaic"), 2, x)


def test_the_reference_adds_terms_and_devices():
    x = jnp.arange(6.0).reshape(3, 2)
    found = over(ONE, functools.partial(sum_over_devices, axis="model", has_terms=True))(x)
    np.testing.assert_array_equal(found, [[6.0, 9.0]])
    np.testing.assert_array_equal(over(ONE, lambda x: sum_over_devices(x, "model"))(x), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(2, np.int32), "model"), "x has the dtype int32: expected floating"),
        ((np.ones(2), 0), "axis is 0: expected a mesh axis's name"),
        ((np.ones(2), "other"), "there is no mesh axis 'other' here: call it under shard_map"),
        ((np.ones(2), "model", 3), "inbox is 3: expected a Inbox"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        over(ONE, lambda _: sum_over_devices(*arguments))(jnp.ones(2))


def test_a_scalar_has_no_terms():
    with pytest.raises(ValueError, match=r"x is \(\), and has_terms is True: expected terms"):
        over(ONE, lambda x: sum_over_devices(x[0], "model", has_terms=True))(jnp.ones(2))


def test_an_inbox_says_why_there_is_none():
    with pytest.raises(UnsupportedError, match="open_inbox: the default device is 'cpu'"):
        over(ONE, lambda x: open_inbox("model", 16) and x)(jnp.ones(2))
    with pytest.raises(UnsupportedError, match="most_bytes is 1048577: expected at most 1048576"):
        over(ONE, lambda x: open_inbox("model", (1 << 20) + 1) and x)(jnp.ones(2))


def test_an_inbox_is_for_several_devices(pretend_gpu):
    with pytest.raises(UnsupportedError, match=r"has 1 devices: expected 2 to 8|older than"):
        over(ONE, lambda x: open_inbox("model", 16) and x)(jnp.ones(2))


def test_the_kernel_needs_an_inbox():
    with pytest.raises(UnsupportedError, match="'mosaic' can't run: there is no inbox"):
        over(ONE, lambda x: sum_over_devices(x, "model", implementation="mosaic"))(jnp.ones(2))


@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() < 2, reason="there is one device")
def test_ten_thousand_sums_while_a_device_waits_now_and_then():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("model",))
    sizes = [8, 4096, 2048, 65536, 4]

    def run(own):
        inbox, rank = open_inbox("model", 4 * max(sizes)), jax.lax.axis_index("model")

        def some(number, wrong):
            waits = (number * 1103515245 + rank * 7919) // 65536 % 4
            x = own + jax.lax.fori_loop(0, waits, lambda _, y: y * 0, own) * 0
            for size in sizes:
                factor = (number % 1000 + size).astype(jnp.float32)
                total = sum_over_devices(x[:size] * factor, "model", inbox)
                wrong += jnp.sum(total != 3 * factor).astype(jnp.int32)
            return wrong

        return jax.lax.fori_loop(0, 2000, some, jnp.int32(0))[None]

    own = jnp.repeat(jnp.array([1.0, 2.0]), max(sizes))
    np.testing.assert_array_equal(jax.jit(over(mesh, run))(own), [0, 0])

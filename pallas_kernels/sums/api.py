"""The public sum over devices."""

from __future__ import annotations

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_array, require_floats, shown
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.sums.plans import MOST_BYTES, Problem, plan_of

Implementation = Literal["mosaic", "reference"]
LEAST_CAPABILITY = 9.0  # of Mosaic's kernels


def sum_over_devices(
    x: jax.Array,
    axis: str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The sum of the x of all devices along an axis of the mesh, which each device gets.

    Under `shard_map`. x: any shape, in a float dtype, which the result has too.
    axis: the name of the axis.
    mesh: of `shard_map`, inside which JAX does not tell the devices; a requested `mosaic` needs it.
    implementation: `reference`, which is `jax.lax.psum`; or `mosaic`, a kernel in which each device
        writes its x into the memory of all others, for float32 of up to 2 MiB, on GPUs of one
        process of compute capability 9.0 or more, which are the first of `jax.devices()` in their
        order and the mesh's only axis. By default the one that a table has as the faster one for
        this size on this kind of GPU, and `reference` where none has.

    Differentiable. Raises ValueError for arguments of other kinds, and UnsupportedError, with the
    reason, where a requested implementation can't run.
    """
    x = as_array("sum_over_devices: x", x)
    require_floats("sum_over_devices", x=x)
    if not isinstance(axis, str):
        raise ValueError(f"sum_over_devices: axis is {shown(axis)}: expected a mesh axis's name")
    devices = _count(axis)
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ValueError(f"sum_over_devices: mesh is {shown(mesh)}: expected a jax.sharding.Mesh")
    reason = _why_not_mosaic(x, axis) or _why_not_of(mesh, is_needed=implementation == "mosaic")
    name = choose(
        "sum_over_devices",
        implementation,
        "reference" if reason else plan_of(_problem(x, devices)).implementation,
        get_args(Implementation),
        lambda _: reason,
    )
    add = functools.partial(jax.lax.psum, axis_name=axis)
    if name == "reference":
        return add(x)
    from mpjax.kernels.sums import peer  # here, as importing it takes a while

    return with_gradients_of(add, lambda x: peer.peer_sum(x, axis, devices), x)


def _problem(x: jax.Array, devices: int) -> Problem:
    return Problem(devices, x.size * x.dtype.itemsize, device.limits())


def _count(axis: str) -> int:
    """The number of devices along an axis. Raises ValueError for an axis that there is not."""
    try:
        return jax.lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"sum_over_devices: there is no mesh axis {axis!r} here: call it under shard_map over "
            "a mesh with that axis"
        ) from error


def _why_not_mosaic(x: jax.Array, axis: str) -> str | None:
    if reason := device.why_triton_cannot_run():
        return reason
    if (capability := device.compute_capability()) is None or capability < LEAST_CAPABILITY:
        return f"compute capability {capability} is below {LEAST_CAPABILITY}"
    if jax.process_count() > 1:
        return "the devices are of several processes"
    axes = jax.sharding.get_abstract_mesh().axis_names
    if axes != (axis,):
        return f"the mesh has the axes {axes}, expected {axis!r} alone"
    if x.dtype != jnp.float32:
        return f"x is {x.dtype}, expected float32"
    if not 0 < x.size * 4 <= MOST_BYTES:
        return f"x has {x.size * 4} bytes, expected 1 to {MOST_BYTES}"
    return None


def _why_not_of(mesh: jax.sharding.Mesh | None, *, is_needed: bool) -> str | None:
    """Why the kernel can't run on the devices of a mesh; None if it can.

    Its writes go to devices by their places among `jax.devices()`.
    """
    if mesh is None:
        return (
            "it needs the mesh of shard_map, to check its devices: pass mesh" if is_needed else None
        )
    devices = list(mesh.devices.flat)
    if devices != jax.devices()[: len(devices)]:
        return (
            f"the mesh has the devices {[device.id for device in devices]}, expected the first of "
            "jax.devices() in their order"
        )
    return None

"""The sum of arrays over the devices of a mesh axis."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_array, require_floats, require_type, shown, whole_number
from mpjax.kernels.implementation import choose
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.sums.layout import MOST_BYTES, MOST_DEVICES, UNIT, inbox_words
from mpjax.kernels.varying_axes import vary_alike

Implementation = Literal["mosaic", "reference"]
CAPABILITIES = 9.0, 10.0, 10.3  # Hopper, for which Mosaic GPU is written, and Blackwell's servers
LEAST_VERSION = (0, 11, 2)  # of JAX, in which a kernel takes references


@functools.partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["limits"])
@dataclasses.dataclass(frozen=True)
class Inbox:
    """Memory of each device, into which the others write in `sum_over_devices`.

    words: a reference to int32. limits: the mesh axis, its number of devices, and the most bytes of
    an array (static).
    """

    words: Any
    limits: tuple[str, int, int]


def open_inbox(axis: str, most_bytes: int) -> Inbox:
    """An inbox for sums over a mesh axis in the same call of a function under `shard_map`.

    axis: the mesh's only axis. All devices are GPUs of one process that can write to one another's
        memory.
    most_bytes: of an array to be summed, at most 1 MiB; larger ones are summed by the reference.

    The devices wait for one another here, so open one inbox for many sums. Raises ValueError for
    arguments of other kinds, and UnsupportedError, with the reason, if the kernel can't run here.
    """
    devices = _count("open_inbox", axis)
    most_bytes = whole_number("open_inbox: most_bytes", most_bytes)
    if most_bytes > MOST_BYTES:
        raise device.UnsupportedError(
            f"open_inbox: most_bytes is {most_bytes}: expected at most {MOST_BYTES}"
        )
    if reason := why_no_inbox(axis):
        raise device.UnsupportedError(f"open_inbox: {reason}")
    from mpjax.kernels.sums import mosaic  # here, as importing it takes a while

    limits = axis, devices, most_bytes
    words = inbox_words(devices, most_bytes)
    return Inbox(mosaic.open_inbox(axis, devices, words), limits)


def sum_over_devices(
    x: jax.Array,
    axis: str,
    inbox: Inbox | None = None,
    *,
    has_terms: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """The sum of the x of all devices of a mesh axis, on each of them, under `shard_map`.

    x: floats of any shape; the result has its shape and dtype.
    has_terms: whether to sum over the first axis of x, too; the result has size 1 there.
    axis: the name of the axis. inbox: of this axis, or None.
    implementation: `reference` is `jax.lax.psum`, which adds in an order that depends on an
        element's place, or in a batch-invariant context a sum in the order of the devices.
        `mosaic` is a kernel in which each device writes its x into the others' inboxes, and adds
        all in float32 in the order of the devices, so all get the same bits. It takes float32 and
        bfloat16, sums at most the inbox's bytes, and has no gradient. All devices must compute the
        same sums in the same order. By default the kernel if there is an inbox and x suits it.

    Raises ValueError for arguments of other kinds, and UnsupportedError, with the reason, if a
    forced implementation can't run.
    """
    x = as_array("sum_over_devices: x", x)
    require_floats("sum_over_devices", x=x)
    _count("sum_over_devices", axis)
    if inbox is not None:
        require_type("sum_over_devices: inbox", inbox, Inbox)
    require_type("sum_over_devices: has_terms", has_terms, bool)
    if has_terms and (not x.ndim or not len(x)):
        raise ValueError(f"sum_over_devices: x is {x.shape}, and has_terms is True: expected terms")
    terms = x if has_terms else x[None]
    reason = _why_not_mosaic(terms, axis, inbox)
    name = choose(
        "sum_over_devices",
        implementation,
        "reference" if reason else "mosaic",
        get_args(Implementation),
        lambda _: reason,
    )
    if name == "reference":
        total = terms.sum(0, keepdims=True) if has_terms else x
        return _in_order(total, axis) if is_batch_invariant() else jax.lax.psum(total, axis)
    assert inbox is not None
    from mpjax.kernels.sums import mosaic

    _, devices, most_bytes = inbox.limits
    flat = terms.reshape(len(terms), -1)
    size = flat.shape[1]
    padded = jnp.pad(flat, ((0, 0), (0, -size % (UNIT // x.dtype.itemsize))))
    total = mosaic.add(padded, inbox.words, devices, most_bytes)[:size]
    shape = (1, *x.shape[1:]) if has_terms else x.shape
    return vary_alike((total.reshape(shape), x))[0]


def _in_order(x: jax.Array, axis: str) -> jax.Array:
    """The sum of all devices' arrays, which each device gets and adds in the devices' order."""
    first, *others = jax.lax.all_gather(x, axis)
    return functools.reduce(jnp.add, others, first)


def why_no_inbox(axis: str) -> str | None:
    """The reason why a mesh axis can have no inbox, or None; see `open_inbox`."""
    if reason := device.why_triton_cannot_run():
        return reason
    if (capability := device.compute_capability()) not in CAPABILITIES:
        return f"compute capability {capability} is not one of {CAPABILITIES}"
    if jax.__version_info__ < LEAST_VERSION:
        return f"JAX {jax.__version__} is older than {'.'.join(map(str, LEAST_VERSION))}"
    if jax.process_count() > 1:
        return "the devices are of several processes"
    if reason := device.why_no_peers():
        return reason
    axes = jax.sharding.get_abstract_mesh().axis_names
    if axes != (axis,):
        return f"the mesh has the axes {axes}: expected {axis!r} alone"
    if not 2 <= (devices := jax.lax.axis_size(axis)) <= MOST_DEVICES:
        return f"the mesh has {devices} devices: expected 2 to {MOST_DEVICES}"
    return None


def _why_not_mosaic(terms: jax.Array, axis: str, inbox: Inbox | None) -> str | None:
    if inbox is None:
        return "there is no inbox"
    own, _, most_bytes = inbox.limits
    if axis != own:
        return f"the inbox is of the axis {own!r}, and axis is {axis!r}"
    if terms.dtype not in (jnp.float32, jnp.bfloat16):
        return f"x is {terms.dtype}: expected float32 or bfloat16"
    if not 0 < (nbytes := terms[0].nbytes) <= most_bytes:
        return f"a sum has {nbytes} bytes: expected 1 to {most_bytes}, as the inbox has room for"
    return None


def _count(operation: str, axis: str) -> int:
    """The number of devices of a mesh axis. Raises ValueError for no axis."""
    if not isinstance(axis, str):
        raise ValueError(f"{operation}: axis is {shown(axis)}: expected a mesh axis's name")
    try:
        return int(jax.lax.axis_size(axis))
    except NameError as error:
        raise ValueError(
            f"{operation}: there is no mesh axis {axis!r} here: call it under shard_map over a "
            "mesh with that axis"
        ) from error

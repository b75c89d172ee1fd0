"""Steps of one token of each row as operations, with states indexed by slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mpjax.kernels import device
from mpjax.kernels.checks import as_arrays, optional_array, require_floats, require_type, shown
from mpjax.kernels.gradients import with_gradients_of
from mpjax.kernels.implementation import choose
from mpjax.kernels.recurrent.steps import reference, triton
from mpjax.kernels.recurrent.steps.gates import DeltaGates, ScanGates
from mpjax.kernels.recurrent.steps.rows import StateRows

Implementation = Literal["triton", "reference"]


def convolution_step(
    x: jax.Array,
    weight: jax.Array,
    states: jax.Array,
    rows: StateRows,
    *,
    bias: jax.Array | None = None,
    activation: Literal["silu"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of each row in `causal_convolution`.

    x: [rows, channels]. weight: [channels, width]. bias: [channels].
    states: [slots, width − 1, channels], the last inputs of each sequence, the newest last.

    Returns y in the shape and dtype of x, and the states, updated in place if they are donated.

    Raises ValueError for shapes and dtypes that don't fit, and UnsupportedError, with the reason,
    if a forced implementation can't run.
    """
    name = "convolution_step"
    x, weight, states = as_arrays(name, x=x, weight=weight, states=states)
    bias = optional_array(f"{name}: bias", bias)
    require_floats(
        name, x=x, weight=weight, states=states, **({} if bias is None else {"bias": bias})
    )
    if activation is not None and str(activation) != "silu":
        raise ValueError(f"{name}: activation is {shown(activation)}: expected 'silu' or None")
    channels = x.shape[-1] if x.ndim == 2 else None
    if channels is None or weight.ndim != 2 or len(weight) != channels or weight.size == 0:
        raise ValueError(
            f"{name}: x and weight are {shown(x)} and {shown(weight)}: expected [rows, channels] "
            "and [channels, width]"
        )
    inputs = weight.shape[1] - 1, channels
    if states.ndim != 3 or states.shape[1:] != inputs or not len(states):
        raise ValueError(f"{name}: states is {shown(states)}: expected {('slots', *inputs)}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"{name}: bias is {shown(bias)}: expected {(channels,)}")
    arguments = x, weight, bias, states, _read_rows(name, rows, len(x))
    return _run(name, implementation, arguments, silu=activation is not None)


def gated_delta_step(
    channels: jax.Array,
    gates: DeltaGates,
    states: jax.Array,
    rows: StateRows,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of each row in `gated_delta_rule`, including its gates.

    channels: [rows, channels], the queries and keys of all key heads, K each, and the values of all
        value heads, V each.
    states: float32 [slots, value heads, K, V].

    Returns the outputs float32 [rows, value heads, V], and the states, updated in place if they are
    donated. On a GPU, each state is read and written once.

    Raises ValueError for shapes and dtypes that don't fit, and UnsupportedError, with the reason,
    if a forced implementation can't run.
    """
    name = "gated_delta_step"
    require_type(f"{name}: gates", gates, DeltaGates)
    channels, states = _read_states(name, channels, states, "value heads, K, V")
    heads, size, width = states.shape[1:]
    _require_groups(name, channels, states, (channels.shape[1] - heads * width, size))
    gates = gates.read(name, (len(channels), heads), size)
    return _run(
        name, implementation, (channels, gates, states, _read_rows(name, rows, len(channels)))
    )


def state_space_step(
    channels: jax.Array,
    gates: ScanGates,
    states: jax.Array,
    rows: StateRows,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of each row in `state_space_scan`, including its gates and skip · x.

    channels: [rows, channels], x of all heads, and b and c of all groups, N each.
    states: float32 [slots, heads, channels of a head, N].

    Returns the outputs float32 [rows, heads, channels of a head], and the states, updated in place
    if they are donated. On a GPU, each state is read and written once.

    Raises ValueError for shapes and dtypes that don't fit, and UnsupportedError, with the reason,
    if a forced implementation can't run.
    """
    name = "state_space_step"
    require_type(f"{name}: gates", gates, ScanGates)
    channels, states = _read_states(name, channels, states, "heads, channels of a head, N")
    heads, width, size = states.shape[1:]
    _require_groups(name, channels, states, (channels.shape[1] - heads * width, size))
    gates = gates.read(name, (len(channels), heads))
    return _run(
        name, implementation, (channels, gates, states, _read_rows(name, rows, len(channels)))
    )


def _read_states(name: str, channels: Any, states: Any, axes: str) -> tuple[jax.Array, jax.Array]:
    """Channels and states as arrays. Raises ValueError for other ranks and dtypes."""
    channels, states = as_arrays(name, channels=channels, states=states)
    require_floats(name, channels=channels, states=states)
    if states.ndim != 4 or states.dtype != jnp.float32 or not states.size or channels.ndim != 2:
        raise ValueError(
            f"{name}: channels and states are {shown(channels)} and {shown(states)}: expected "
            f"[rows, channels], and float32 [slots, {axes}]"
        )
    return channels, states


def _require_groups(
    name: str, channels: jax.Array, states: jax.Array, shared: tuple[int, int]
) -> None:
    """Raises ValueError unless the channels of queries and keys, or b and c, fill whole groups.

    shared: the number of these channels, and the size of a group's query or key, or of its b or c:
        a group of heads has twice as many channels.
    """
    rest, size = shared
    groups = rest // (2 * size)
    if groups < 1 or rest % (2 * size) or states.shape[1] % groups:
        raise ValueError(
            f"{name}: channels and states are {shown(channels)} and {shown(states)}: expected "
            f"the channels of all heads, and twice {size} channels for each group of heads"
        )


def _read_rows(name: str, rows: Any, count: int) -> StateRows:
    require_type(f"{name}: rows", rows, StateRows)
    found: StateRows = rows.read(f"{name}: rows", count)
    return found


def _run(
    name: str, implementation: str | None, arguments: tuple[Any, ...], **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Runs the step of an implementation, with the derivatives of the reference.

    Steps of several tokens of a row have no derivatives.
    """
    has_work = bool(len(arguments[0]))
    chosen = choose(
        name,
        implementation,
        "triton" if has_work else "reference",
        ("triton", "reference"),
        lambda _: device.why_triton_cannot_run(),
    )
    plain: Callable[..., Any] = functools.partial(getattr(reference, name), **options)
    if arguments[-1].begins is not None:
        plain = functools.partial(reference.in_order, plain)
    if chosen == "reference":
        result: tuple[jax.Array, jax.Array] = plain(*arguments)
        return result
    kernel = functools.partial(getattr(triton, name), **options)
    found: tuple[jax.Array, jax.Array] = with_gradients_of(plain, kernel, *arguments)
    return found

"""Steps as Triton kernels: a program updates a part of one row's state, in place.

A state is divided among programs along independent channels: values of the delta rule, channels of
a head in Mamba2, all channels of a convolution. So no program waits for another, and a single row
keeps a GPU busy. The slot of a row's state is loaded inside the kernel. Several tokens of a row are
processed one after another, with the state in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mpjax.kernels import device
from mpjax.kernels.invariance import is_batch_invariant
from mpjax.kernels.launch import Settings, first_program_id, launch, load, store
from mpjax.kernels.recurrent.delta_inputs import EPSILON
from mpjax.kernels.recurrent.steps.gates import DeltaGates, ScanGates
from mpjax.kernels.recurrent.steps.rows import StateRows

TILE, WARPS = 4096, 4  # elements of a state in a program's registers, 32 per thread
# The same for the delta rule, with few programs, and with many.
FEW, MANY = (2048, 2), (8192, 2)
FEW_PROGRAMS = 3  # for each multiprocessor
CHANNELS, CONVOLUTION_WARPS = 256, 2  # of a program of the convolution
ONCE = "evict_first"  # of caches: a step reads and writes a state once
LEAST_PART = 8  # channels: 32 bytes, the least that memory loads


class _Operands(NamedTuple):
    """The inputs of a kernel besides states: arrays outside of it, references inside."""

    x: Any  # [rows, channels]
    parameters: Any
    slots: Any  # int32 [rows]
    is_new: Any  # bool [rows]
    begins: Any = None  # int32 [rows]
    counts: Any = None  # int32 [rows]

    @classmethod
    def of(cls, x: jax.Array, parameters: Any, rows: StateRows) -> _Operands:
        """The inputs of rows."""
        return cls(x, parameters, rows.slots, rows.is_new, rows.begins, rows.counts)


def _over_tokens(operands: _Operands, state: Any, advance: Callable[[jax.Array, Any], Any]) -> Any:
    """The state after all tokens of a program's row. advance: (token, state) → state."""
    row = pl.program_id(1)
    if operands.begins is None:
        return advance(row, state)
    begin, count = load(operands.begins.at[row]), load(operands.counts.at[row])
    return jax.lax.fori_loop(begin, begin + count, advance, state)


class _Place(NamedTuple):
    """The slot of a program's row among the states, inside a kernel."""

    slot: jax.Array
    has_token: jax.Array
    has_state: jax.Array  # whether there is a token, and its state is not zeros

    @classmethod
    def find(cls, operands: _Operands, states: Any) -> _Place:
        """The slot of the row with the program's index along the grid's second axis."""
        row = pl.program_id(1)
        slot, is_new = load(operands.slots.at[row]), load(operands.is_new.at[row])
        has_token = (slot >= 0) & (slot < states.shape[0])
        return cls(jnp.clip(slot, 0, states.shape[0] - 1), has_token, has_token & ~is_new)


def convolution_step(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    states: jax.Array,
    rows: StateRows,
    *,
    silu: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The convolution of one token of each row; see the public function."""
    kernel = functools.partial(_convolution, silu=silu)
    settings = Settings("convolution_step", warps=CONVOLUTION_WARPS)
    outputs = jax.ShapeDtypeStruct(x.shape, x.dtype)
    programs = pl.cdiv(x.shape[1], CHANNELS)
    operands = _Operands.of(x, (weight, bias), rows)
    return _launch(kernel, operands, states, outputs, (programs, settings, interpret))


def gated_delta_step(
    channels: jax.Array,
    gates: DeltaGates,
    states: jax.Array,
    rows: StateRows,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule of one token of each row; see the public function."""
    heads, size, width = states.shape[1:]
    part, warps = _values_and_warps(len(rows.slots) * heads, size, width)
    settings = Settings("gated_delta_step", warps=warps)
    outputs = jax.ShapeDtypeStruct((len(channels), heads, width), jnp.float32)
    programs = heads * pl.cdiv(width, part)
    operands = _Operands.of(channels, gates, rows)
    kernel = functools.partial(_delta, part=part)
    return _launch(kernel, operands, states, outputs, (programs, settings, interpret))


def state_space_step(
    channels: jax.Array,
    gates: ScanGates,
    states: jax.Array,
    rows: StateRows,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Mamba2's step of one token of each row; see the public function."""
    heads, width, size = states.shape[1:]
    part = _part(size, width)
    settings = Settings("state_space_step", warps=WARPS)
    outputs = jax.ShapeDtypeStruct((len(channels), heads, width), jnp.float32)
    programs = heads * pl.cdiv(width, part)
    operands = _Operands.of(channels, gates, rows)
    kernel = functools.partial(_scan, part=part)
    return _launch(kernel, operands, states, outputs, (programs, settings, interpret))


def _launch(
    kernel: Callable[..., None],
    operands: _Operands,
    states: jax.Array,
    outputs: jax.ShapeDtypeStruct,
    how: tuple[int, Settings, bool],
) -> tuple[jax.Array, jax.Array]:
    """The outputs and the states, which reuse the buffer of the old states.

    how: the programs of a row, their settings, and whether to interpret the kernel.
    """
    programs, settings, interpret = how
    result: tuple[jax.Array, jax.Array] = launch(
        kernel,
        operands,
        states,
        out_shape=(outputs, jax.ShapeDtypeStruct(states.shape, states.dtype)),
        grid=(programs, len(operands.slots)),
        settings=settings,
        interpret=interpret,
        aliases={len(jax.tree.leaves(operands)): 1},
    )
    return result


def _values_and_warps(heads: int, size: int, width: int) -> tuple[int, int]:
    """The values of a head in a program of the delta rule, and its warps.

    They decide the order of sums, so that a batch-invariant step has the same for all batches.

    heads: of all rows. size, width: of the keys and values of a head.
    """
    if is_batch_invariant():
        return _part(size, width), WARPS
    part, warps = _part(size, width, FEW[0]), FEW[1]
    if heads * pl.cdiv(width, part) > FEW_PROGRAMS * device.multiprocessors():
        part, warps = _part(size, width, MANY[0]), MANY[1]
    return part, warps


def _part(size: int, width: int, tile: int = TILE) -> int:
    """The channels of a program, of `width` in all, each with `size` elements of the state.

    tile: the elements of a program.
    """
    fitting = max(LEAST_PART, tile // pl.next_power_of_2(size))
    return min(fitting, pl.next_power_of_2(width))


def _convolution(
    operands: _Operands, before: Any, outputs: Any, states: Any, *, silu: bool
) -> None:
    program = first_program_id()
    weight, bias = operands.parameters
    taps, channels = weight.shape[1], operands.x.shape[1]
    place = _Place.find(operands, states)
    channel = program * CHANNELS + jnp.arange(CHANNELS)
    inside = channel < channels
    kept = tuple(
        load(
            before.at[place.slot, jnp.int32(tap), channel],
            mask=inside & place.has_state,
            other=0,
        )
        for tap in range(taps - 1)
    )

    def advance(token: jax.Array, kept: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # All loads come before the first store: the compiler doesn't move loads up past a store.
        new = load(operands.x.at[token, channel], mask=inside, other=0)
        factors = [
            load(weight.at[channel, jnp.int32(tap)], mask=inside, other=0) for tap in range(taps)
        ]
        known = [*(state.astype(new.dtype) for state in kept), new]
        total = jnp.zeros(CHANNELS, jnp.float32)
        for factor, tap in zip(factors, known, strict=True):
            total += tap.astype(jnp.float32) * factor.astype(jnp.float32)
        if bias is not None:
            total += load(bias.at[channel], mask=inside, other=0).astype(jnp.float32)
        if silu:
            total = total * _sigmoid(total)
        store(outputs.at[token, channel], total.astype(outputs.dtype), mask=inside)
        return (*kept, new.astype(states.dtype))[1:]

    for number, state in enumerate(_over_tokens(operands, kept, advance)):
        target = states.at[place.slot, jnp.int32(number), channel]
        store(target, state, mask=inside & place.has_token)


def _delta(operands: _Operands, before: Any, outputs: Any, states: Any, *, part: int) -> None:
    program = first_program_id()
    heads, size, width = states.shape[1:]
    parts = pl.cdiv(width, part)
    head, place = program // parts, _Place.find(operands, states)
    keys = (operands.x.shape[1] - heads * width) // 2
    k = jnp.arange(pl.next_power_of_2(size))
    v = program % parts * part + jnp.arange(part)
    inside = (k < size)[:, None] & (v < width)[None, :]
    where = place.slot, head, k[:, None], v[None, :]
    shared = head // (heads // (keys // size)) * size

    def advance(token: jax.Array, state: jax.Array) -> jax.Array:
        query, key = (
            _normal(load(operands.x.at[token, begin + shared + k], mask=k < size, other=0))
            for begin in (0, keys)
        )
        value = load(operands.x.at[token, 2 * keys + head * width + v], mask=v < width, other=0)
        factor, rate = _delta_gates(operands.parameters, token, head, k < size)
        query = query * size**-0.5
        known = (state * (factor * key)[:, None]).sum(0)
        asked = (state * (factor * query)[:, None]).sum(0)
        error = rate * (value.astype(jnp.float32) - known)
        output = asked + (query * key).sum() * error
        store(outputs.at[token, head, v], output, mask=v < width)
        return factor[:, None] * state + key[:, None] * error[None, :]

    is_known = inside & place.has_state
    state = load(before.at[where], mask=is_known, other=0.0, eviction_policy=ONCE)
    after = _over_tokens(operands, state, advance)
    is_used = inside & place.has_token
    store(states.at[where], after, mask=is_used, eviction_policy=ONCE)


def _normal(x: jax.Array) -> jax.Array:
    """Float32 x / √(Σx² + ε)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum() + EPSILON)


def _delta_gates(
    gates: Any, token: jax.Array, head: jax.Array, inside: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The decay factors of a head's state, float32 [1] or [K], and β, float32 [1].

    inside: bool [K's next power of two], whether there is such a key channel.
    """
    one, channel = head + jnp.arange(1), jnp.arange(len(inside))
    rate, speed = (
        load(ref).astype(jnp.float32) for ref in (gates.rate.at[token, one], gates.speed.at[one])
    )
    if len(gates.shift.shape) == 1:
        raw = [load(gates.decay.at[token, one]), load(gates.shift.at[one])]
    else:
        places = gates.decay.at[token, head, channel], gates.shift.at[head, channel]
        raw = [load(place, mask=inside, other=0) for place in places]
    decay, shift = (x.astype(jnp.float32) for x in raw)
    return jnp.exp(-jnp.exp(speed) * _softplus(decay + shift)), gates.scaled(_sigmoid(rate))


def _scan(operands: _Operands, before: Any, outputs: Any, states: Any, *, part: int) -> None:
    program = first_program_id()
    heads, width, size = states.shape[1:]
    parts = pl.cdiv(width, part)
    head, place = program // parts, _Place.find(operands, states)
    inner = heads * width
    shared = (operands.x.shape[1] - inner) // 2
    channel = program % parts * part + jnp.arange(part)
    n = jnp.arange(pl.next_power_of_2(size))
    inside = (channel < width)[:, None] & (n < size)[None, :]
    where = place.slot, head, channel[:, None], n[None, :]
    is_real = channel < width
    first = inner + head // (heads // (shared // size)) * size
    gates, one = operands.parameters, head + jnp.arange(1)

    def advance(token: jax.Array, state: jax.Array) -> jax.Array:
        x = load(operands.x.at[token, head * width + channel], mask=is_real, other=0)
        b, c = (
            load(operands.x.at[token, begin + n], mask=n < size, other=0).astype(jnp.float32)
            for begin in (first, first + shared)
        )
        speed, shift, skip = (
            load(array.at[one]).astype(jnp.float32)
            for array in (gates.speed, gates.shift, gates.skip)
        )
        steps = load(gates.steps.at[token, one]).astype(jnp.float32)
        step = gates.limited(_softplus(steps + shift))
        x = x.astype(jnp.float32)
        factor = jnp.exp(-jnp.exp(speed) * step)[:, None]
        after = factor * state + (step * x)[:, None] * b[None, :]
        output = (after * c[None, :]).sum(1) + skip * x
        store(outputs.at[token, head, channel], output, mask=is_real)
        return after

    state = load(before.at[where], mask=inside & place.has_state, other=0.0)
    after = _over_tokens(operands, state, advance)
    store(states.at[where], after, mask=inside & place.has_token)


def _softplus(x: jax.Array) -> jax.Array:
    """Float32 log(1 + exp(x)), from functions that Triton has."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def _sigmoid(x: jax.Array) -> jax.Array:
    """Float32 1 / (1 + exp(−x)), from functions that Triton has."""
    return 1.0 / (1.0 + jnp.exp(-x))

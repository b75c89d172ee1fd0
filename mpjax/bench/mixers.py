"""Benchmark of recurrent mixers: decoding steps of many rows, and prefill of one prompt.

A step is compared with the time in which XLA reads and writes the states' bytes, prefill with
cuDNN's attention in an attention layer of the same model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.bench import attention, measure, tables
from mpjax.kernels import (
    DeltaGates,
    DeltaInputs,
    ScanGates,
    StateRows,
    gated_delta_rule,
    gated_delta_step,
    state_space_scan,
    state_space_step,
)
from mpjax.kernels.attention.shapes import AttentionShape
from mpjax.kernels.recurrent.shapes import RecurrentShape

GATE = 1e-5  # relative error: everything is computed in float32
COLUMNS: tables.Columns = {
    "rows": "{rows}",
    "tokens": "{tokens}",
    "µs": "{microseconds:.1f}",
    "TB/s": tables.scaled("{:.2f}", "gigabytes_per_second", 1e-3),
    "× floor": "{times_floor:.2f}",
    "cuDNN µs": "{cudnn_microseconds:.1f}",
    "× cuDNN": "{times_cudnn:.2f}",
    "error": "{relative_error:.1e}",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The cases of the benchmark: for each shape, decoding steps and prefills of one prompt.

    Raises ValueError for rows and lengths below 1, and for prompts of one token.
    """

    shapes: tuple[RecurrentShape, ...]
    rows: tuple[int, ...]
    prompt_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.rows, default=1) < 1 or min(self.prompt_tokens, default=2) < 2:
            raise ValueError(
                f"rows are {self.rows} and prompt_tokens {self.prompt_tokens}: expected 1 or more "
                "rows, and 2 or more tokens"
            )

    @property
    def cases(self) -> int:
        """The number of rows that `run` yields."""
        return len(self.shapes) * (len(self.rows) + len(self.prompt_tokens))


def figures(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the figures derived from its measured times.

    GB/s count the bytes of the states twice, since each state is read and written.
    """
    time, found = row["microseconds"], dict(row)
    if row["floor_microseconds"] is not None:
        found["gigabytes_per_second"] = 2 * row["state_bytes"] / time / 1e3
        found["times_floor"] = time / row["floor_microseconds"]
    if row["cudnn_microseconds"] is not None:
        found["times_cudnn"] = time / row["cudnn_microseconds"]
    return found


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row whose error is NaN or not below the limit."""
    return measure.failures(rows, "{shape}, {rows} rows of {tokens} tokens", GATE)


def run(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Measures every case of a sweep on the default device, and yields its row."""
    for shape in sweep.shapes:
        for rows in sweep.rows:
            yield _step(shape, rows)
        for tokens in sweep.prompt_tokens:
            yield _prompt(shape, tokens)


def random_tokens(shape: RecurrentShape, rows: int, tokens: int, seed: int = 0) -> Any:
    """Random inputs of the prefill operation, [rows, tokens, ...]: bfloat16, gates float32."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def draw(heads: int, channels: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, tokens, heads, channels), jnp.bfloat16)

    first, second = (draw(shape.groups, shape.keys) for _ in range(2))
    value = draw(shape.heads, shape.values)
    decay, rate = (jax.random.uniform(next(keys), (rows, tokens, shape.heads)) for _ in range(2))
    if shape.by_channel:
        decay = jax.random.uniform(next(keys), (*decay.shape, shape.keys))
    if shape.kind == "delta":
        return DeltaInputs(first, second, value, -decay, rate)
    return value, decay, first, second


def read(shape: RecurrentShape, state: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
    """The states after tokens [rows, tokens], and the outputs."""
    if shape.kind == "delta":
        outputs, state = gated_delta_rule(tokens, state)
        return state, outputs
    value, decay, first, second = tokens
    outputs, state = state_space_scan(value, decay, -jnp.ones(shape.heads), first, second, state)
    return state, outputs


def _random_state(shape: RecurrentShape, rows: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1000 + seed), (rows, *shape.state))


def random_step(shape: RecurrentShape, rows: int, seed: int) -> tuple[jax.Array, Any, StateRows]:
    """Random inputs of the step operation: channels and gates, bfloat16, and the rows' slots."""
    keys = jax.random.split(jax.random.key(seed), 3)
    width = 2 * shape.groups * shape.keys + shape.heads * shape.values
    channels = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    first, second = (jax.random.normal(key, (rows, shape.heads), jnp.bfloat16) for key in keys[1:])
    ones = jnp.ones(shape.heads)
    gates: Any = ScanGates(first, ones, ones, ones)
    if shape.by_channel:
        of_channels = jnp.ones((shape.heads, shape.keys))
        first = first[..., None] * of_channels.astype(first.dtype)[None]
        gates = DeltaGates(first, second, ones, of_channels)
    elif shape.kind == "delta":
        gates = DeltaGates(first, second, ones, ones)
    return channels, gates, StateRows(jnp.arange(rows)[::-1], jnp.zeros(rows, bool))


def step(
    shape: RecurrentShape, states: jax.Array, given: tuple[Any, ...], **options: Any
) -> tuple[jax.Array, jax.Array]:
    """The states after one token of each row, and the outputs. options: of the operation."""
    channels, gates, rows = given
    operation: Any = gated_delta_step if shape.kind == "delta" else state_space_step
    outputs, states = operation(channels, gates, states, rows, **options)
    return states, outputs


class _InTurn:
    """Steps of several states in turn. States are donated and kept, as in a decoding loop."""

    def __init__(self, shape: RecurrentShape, states: list[jax.Array], tokens: list[Any]) -> None:
        def each(states: list[jax.Array], tokens: list[Any]) -> Any:
            pairs = [one(*pair) for pair in zip(states, tokens, strict=True)]
            return [state for state, _ in pairs], [outputs for _, outputs in pairs]

        # An inner `jit`, so that all states share one trace.
        one = jax.jit(functools.partial(step, shape))
        donating = measure.serial_jit(each, donate_argnums=0)
        self.run = donating.lower(states, tokens).compile()
        self.states = states

    def __call__(self, tokens: list[Any]) -> list[jax.Array]:
        self.states, outputs = self.run(self.states, tokens)
        return outputs


def _step(shape: RecurrentShape, rows: int) -> dict[str, Any]:
    """Measures a step of `rows` rows, on several states in turn so that none is in the L2."""
    first = _random_state(shape, rows, 0)
    count = measure.copies(first.nbytes)
    tokens = [random_step(shape, rows, seed) for seed in range(count)]
    states = [_random_state(shape, rows, seed) for seed in range(count)]
    floor = measure.update_microseconds(states)
    steps = _InTurn(shape, states, tokens)
    found = steps(tokens)[0], jnp.copy(steps.states[0])
    plain = jax.jit(functools.partial(step, shape, implementation="reference"))
    error = _error(found, plain(first, tokens[0])[::-1])
    kernels = measure.kernel_microseconds(measure.Unjitted(steps), tokens)
    times = measure.merge_names(kernels, calls=count)
    return _row(shape, rows, 1, first.nbytes, times, error, floor=floor)


def _prompt(shape: RecurrentShape, tokens: int) -> dict[str, Any]:
    """Measures the prefill of a whole prompt."""
    inputs, state = random_tokens(shape, 1, tokens), jnp.zeros((1, *shape.state))
    each = measure.compiled(lambda state, inputs: read(shape, state, inputs), state, inputs)
    times = measure.merge_names(measure.kernel_microseconds(each, state, inputs))
    after, outputs = each(state, inputs)
    last, expected = jax.jit(functools.partial(_by_token, shape))(state, inputs)
    error = _error((outputs, after), (expected, last))
    of_attention = AttentionShape(1, *shape.attention, tokens, tokens)
    cudnn = attention.cudnn_microseconds(of_attention)
    return _row(shape, 1, tokens, state.nbytes, times, error, cudnn=cudnn)


def _row(
    shape: RecurrentShape,
    rows: int,
    tokens: int,
    state_bytes: int,
    times: dict[str, float],
    error: float,
    **others: float,
) -> dict[str, Any]:
    row = {
        "shape": shape.name,
        **dataclasses.asdict(shape),
        "rows": rows,
        "tokens": tokens,
        "state_bytes": state_bytes,
        "microseconds": sum(times.values()),
        "floor_microseconds": others.get("floor"),
        "cudnn_microseconds": others.get("cudnn"),
        "relative_error": error,
        "kernel_microseconds": times,
    }
    return figures(row)


def _error(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> float:
    """The larger of the relative errors of outputs and states."""
    return max(measure.relative_error(*pair) for pair in zip(found, expected, strict=True))


def _by_token(shape: RecurrentShape, state: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
    """The result of `read`, computed token by token."""
    one_each = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], tokens)
    state, outputs = jax.lax.scan(lambda state, token: read(shape, state, token), state, one_each)
    return state, jnp.moveaxis(outputs[:, :, 0], 0, 1)

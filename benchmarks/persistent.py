"""Time of a layer's products after attention as one persistent kernel, beside the usual kernels.

python -m benchmarks.persistent
python -m benchmarks.persistent --out FOLDER --layers 8

The kernel is that of `benchmarks.persistent_kernel`: an experiment for one token of Qwen3-8B's
shapes. It is checked against plain jnp, many times, also while programs and the kernels before it
are slow. Then two chains of layers are measured. Each begins with a norm, which adds the results of
the layer before.

- `products`: the products after attention, with their norm and activation.
- `layer`: that of `benchmarks.early`: the product before attention too, and a kernel that takes
  about as long as attention.

Ways: `today` are the kernels of the usual plans, `persistent` is the one kernel in their place, and
`early` the same, launched before the kernel before has ended. `graph` and `stream`: see
`benchmarks.early`.
A loop on the device runs a chain many times, as decoding does; `microseconds` are those of a layer
of it. `kernels` are the times of a layer's kernels.

`parts` has the kernel's time by the slots that are copied at a time, and without its products,
copies or counters; and the cycles of its programs until each of `persistent_kernel.MARKS`. The
floor is the time in which an XLA reduction would read the weights at its own bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import early, persistent_kernel
from mpjax.bench import measure
from mpjax.kernels import gated, rms_norm

CHAINS = "products", "layer"
GATE = 5e-3  # of a layer, which is rounded to bfloat16 at the same places
REPEATS, STRESS = 10, 10
LAG = 2000  # nanoseconds of a step by which programs are late
IN_FLIGHT = 2, 3, 4, 6, 8, persistent_kernel.SLOTS
ITERATIONS, ROUNDS = 20, 7  # of a loop over a chain, and of calls of the loop


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a chain.

    kernel: `today`, `persistent` or `early`.
    graph: whether kernels are launched as command buffers.
    in_flight, without: of the persistent kernel.
    """

    kernel: str
    graph: bool
    in_flight: int = persistent_kernel.IN_FLIGHT
    without: str | None = None

    @property
    def name(self) -> str:
        """The name in the results."""
        return f"{self.kernel} {'graph' if self.graph else 'stream'}"

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of XLA."""
        return early.Way(self.name, None, self.graph).options


WAYS = (
    Way("today", graph=True),
    Way("persistent", graph=True),
    Way("today", graph=False),
    Way("early", graph=False),
)
_TODAY = early.Way("today", None, graph=True)


class State(NamedTuple):
    """The terms that are added to the stream next, the stream, counters, and waits given up."""

    terms: jax.Array
    stream: jax.Array
    counters: jax.Array
    given_up: jax.Array


def main(arguments: Sequence[str] | None = None) -> None:
    """Checks the kernel, measures all ways, and writes them; exit code 1 if any is wrong."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chains", nargs="*", choices=CHAINS, default=CHAINS)
    given = parser.parse_args(arguments)
    measure.require_gpu()
    weights = early.layers_of(given.layers)
    results: dict[str, Any] = {"layers": given.layers, "check": check(weights[0])}
    print(json.dumps(results["check"]), flush=True)
    results["floor"] = floor(weights[0])
    print(json.dumps(results["floor"]), flush=True)
    results["parts"] = parts(weights)
    print(json.dumps(results["parts"]), flush=True)
    are_right = results["check"]["is_right"]
    for chain in given.chains:
        results[chain] = []
        for row in run(chain, weights):
            results[chain].append(row)
            print(json.dumps({"chain": chain} | row), flush=True)
            measure.save("persistent", results, given.out)
            are_right &= row["is_right"]
    if not are_right:
        raise SystemExit("wrong results")


def floor(weights: early.Layer) -> dict[str, float]:
    """The bytes of the three matrices, and the microseconds to read them."""
    nbytes = sum(each.nbytes for each in (weights.output, weights.gate_up, weights.down))
    bandwidth = measure.read_bandwidth()
    return {
        "megabytes": nbytes / 1e6,
        "bytes_per_second": bandwidth,
        "microseconds": nbytes / bandwidth * 1e6,
    }


def parts(weights: Sequence[early.Layer]) -> dict[str, Any]:
    """Microseconds of the kernel by slots in flight, and without its parts; cycles until MARKS."""
    ways: dict[str, dict[str, Any]] = {
        f"{count} in flight": {"in_flight": count} for count in IN_FLIGHT
    }
    ways |= {f"without {part}": {"without": part} for part in persistent_kernel.PARTS}
    microseconds = {name: kernel_time(weights, **each) for name, each in ways.items()}
    marks = {f"{count} in flight": cycles(weights, count) for count in IN_FLIGHT[1::2]}
    return {"microseconds": microseconds, "cycles": marks}


def kernel_time(weights: Sequence[early.Layer], **options: Any) -> float:
    """Microseconds of the persistent kernel, by CUPTI."""
    way = Way("persistent", graph=True, **options)
    state = _start("products", way, weights)
    call = compiled("products", way, weights, state, delay=0)
    kernels = measure.kernel_microseconds(call, weights, state)
    return sum(each for name, each in kernels.items() if "persistent" in name) / len(weights)


def cycles(weights: Sequence[early.Layer], in_flight: int) -> dict[str, list[int]]:
    """The least, median and most cycles of programs from their begin until each of MARKS."""
    counters = jnp.zeros((persistent_kernel.COUNTERS,), jnp.int32)
    x = jax.random.normal(jax.random.key(4), (1, early.HIDDEN), jnp.bfloat16)
    calls = [persistent(x, x, each, counters, in_flight=in_flight) for each in weights]
    found = np.asarray(calls[-1].clocks).astype(np.uint32)
    elapsed = (found - found[:, persistent_kernel.MARKS.index("begin")][:, None]).astype(np.int32)
    return {
        mark: [int(np.quantile(elapsed[:, number], part)) for part in (0, 0.5, 1)]
        for number, mark in enumerate(persistent_kernel.MARKS)
    }


def reference(
    x: jax.Array, residual: jax.Array, weights: early.Layer
) -> tuple[jax.Array, jax.Array]:
    """The result [1, 4096] and stream of `persistent_kernel.layer`, by plain float32 products."""

    def product(rows: jax.Array, weight: Any) -> jax.Array:
        return jnp.dot(rows.astype(jnp.float32), weight.dequantize(), precision="highest")

    stream = (product(x, weights.output) + residual.astype(jnp.float32)).astype(x.dtype)
    rows = rms_norm(stream, weights.norms[1], early.EPSILON).astype(x.dtype)
    terms = product(rows, weights.gate_up)[None]
    inner: Any = gated(terms, "silu", dtype=x.dtype, implementation="reference")
    return product(inner, weights.down), stream


def check(weights: early.Layer) -> dict[str, Any]:
    """Errors of the kernel for several x, and the calls whose bits differ from those of the first.

    Programs of every second call are late. x changes from call to call, so that what a call left in
    memory is wrong for the next one.
    """
    keys = jax.random.split(jax.random.key(3), 3)
    inputs = [jax.random.normal(key, (2, 1, early.HIDDEN), jnp.bfloat16) for key in keys]
    # XLA would leave out the rounding to bfloat16 and back.
    exact = jax.jit(reference, compiler_options={"xla_allow_excess_precision": False})
    expected = [exact(x, residual, weights) for x, residual in inputs]
    counters = jnp.zeros((persistent_kernel.COUNTERS,), jnp.int32)
    errors: list[float] = []
    first: list[bytes] = []
    different = given_up = 0
    for call in range(REPEATS * len(inputs)):
        number = call % len(inputs)
        x, residual = inputs[number]
        results = persistent(x, residual, weights, counters, lag=call % 2 * LAG)
        given_up += int(results.given_up[0])
        found = results.out, results.stream
        errors += map(early.relative_error, found, expected[number])
        bits = b"".join(jax.device_get(each).tobytes() for each in found)
        if call < len(inputs):
            first.append(bits)
        different += bits != first[number]
    result = {
        "calls": REPEATS * len(inputs),
        "relative_error": max(errors),
        "different_bits": different,
        "waits_given_up": given_up,
        "counters": jax.device_get(counters).tolist(),
    }
    is_right = max(errors) < GATE and not (different or given_up or any(result["counters"]))
    return result | {"is_right": is_right}


def persistent(
    x: jax.Array, residual: jax.Array, weights: early.Layer, counters: jax.Array, **options: Any
) -> persistent_kernel.Results:
    """The products of a layer after attention, by the persistent kernel."""
    matrices = weights.output, weights.gate_up, weights.down
    return persistent_kernel.layer(
        x, residual, weights.norms[1], *matrices, counters, epsilon=early.EPSILON, **options
    )


def run(chain: str, weights: Sequence[early.Layer]) -> Any:
    """A row for each way: microseconds of a layer, and whether its results are those of today."""
    expected = None
    for way in WAYS:
        began = time.perf_counter()
        state = _start(chain, way, weights)
        call = compiled(chain, way, weights, state, delay=0)
        row: dict[str, Any] = {"way": way.name, "compile_seconds": time.perf_counter() - began}
        end = call(weights, state)
        found = end.terms.astype(jnp.float32).sum(0), end.stream
        expected = found if expected is None else expected
        row["relative_error"] = max(map(early.relative_error, found, expected))
        row["waits_given_up"] = int(end.given_up[0])
        row["is_right"] = row["relative_error"] < early.GATE and row["waits_given_up"] == 0
        row["microseconds"] = _loop_microseconds(chain, way, weights, state)
        kernels = measure.kernel_microseconds(call, weights, state)
        row["kernels"] = measure.merge_names(kernels, len(weights))
        if way.kernel != "today" and not way.graph:
            row["stress"] = stress(chain, way, weights, state)
            row["is_right"] &= row["stress"]["different_bits"] == 0
        yield row


def _start(chain: str, way: Way, weights: Sequence[early.Layer]) -> State:
    """A state that a chain begins with: terms of the shape of its results, zeros but for one."""
    terms, stream = jax.random.normal(jax.random.key(2), (2, 1, 1, early.HIDDEN), jnp.bfloat16)
    counters, given_up = (
        jnp.zeros((persistent_kernel.COUNTERS,), jnp.int32),
        jnp.zeros((1,), jnp.int32),
    )
    state = State(terms, stream[0], counters, given_up)
    like = jax.eval_shape(_function(chain, way, 0), weights, state).terms
    zeros = jnp.zeros(like.shape, like.dtype)
    return state._replace(terms=zeros.at[0].set(terms[0].astype(like.dtype)))


def compiled(
    chain: str, way: Way, weights: Sequence[early.Layer], state: State, *, delay: int
) -> jax.stages.Compiled:
    """The program of a chain. delay: of the kernels that write x; see `early.slow_sum`."""
    function = jax.jit(_function(chain, way, delay), compiler_options=way.options)
    return function.lower(weights, state).compile()


def _function(chain: str, way: Way, delay: int) -> Any:
    def run(weights: Sequence[early.Layer], state: State) -> State:
        for each in weights:
            state = step(chain, way, delay, each, state)
        return state

    return run


def step(chain: str, way: Way, delay: int, weights: early.Layer, state: State) -> State:
    """A layer of a chain."""
    multiply = functools.partial(early.product, _TODAY)
    stream, x = early.norm(state.terms, state.stream, weights.norms[0], delay)
    if chain == "layer":
        x = early.attended(multiply("qwen3-8b.qkv", x, weights.qkv), delay)
    if way.kernel != "today":
        is_early = way.kernel == "early"
        options = {"is_early": is_early, "in_flight": way.in_flight, "without": way.without}
        found = persistent(x, stream, weights, state.counters, **options)
        given_up = state.given_up + found.given_up
        return State(found.out[None], found.stream, state.counters, given_up)
    terms = multiply("qwen3-8b.output", x, weights.output)
    stream, x = early.norm(terms, stream, weights.norms[1], delay)
    terms = multiply("qwen3-8b.gate_up", x, weights.gate_up)
    inner: Any = gated(terms, "silu", dtype=x.dtype)
    return state._replace(terms=multiply("qwen3-8b.down", inner, weights.down), stream=stream)


def _loop_microseconds(chain: str, way: Way, weights: Sequence[early.Layer], state: State) -> float:
    """Microseconds of a layer where a loop on the device runs the chain ITERATIONS times."""
    function = _function(chain, way, 0)

    def loop(weights: Sequence[early.Layer], state: State) -> State:
        return jax.lax.fori_loop(0, ITERATIONS, lambda _, each: function(weights, each), state)

    call = jax.jit(loop, compiler_options=way.options).lower(weights, state).compile()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(call(weights, state))
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) / (ITERATIONS * len(weights)) * 1e6


def stress(chain: str, way: Way, weights: Sequence[early.Layer], state: State) -> dict[str, Any]:
    """Calls of slow kernels before the persistent one, whose bits differ from those in a graph.

    A graph waits for each kernel. Slow kernels write x late, into arrays of NaN.
    """
    serial = Way("persistent", graph=True)
    expected, *results = (
        [_bits(call(weights, state)) for _ in range(count)]
        for call, count in (
            (compiled(chain, serial, weights, state, delay=early.DELAY), 1),
            (compiled(chain, way, weights, state, delay=early.DELAY), STRESS),
        )
    )
    different = sum(each != expected[0] for each in results[0])
    return {"calls": STRESS, "different_bits": different}


def _bits(state: State) -> bytes:
    return b"".join(jax.device_get(leaf).tobytes() for leaf in state)


if __name__ == "__main__":
    main()

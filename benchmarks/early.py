"""Time of a chain of products and the kernels between them, by launches early and not, on a GPU.

python -m benchmarks.early OUT.json
python -m benchmarks.early OUT.json --layers 8 --rows 8

A chain is that of decoding steps of Qwen3-8B's shapes. In place of attention a kernel takes as long
and adds the terms of the first 4096 channels. Every way to multiply runs the chain side by side:

- `triton`: the kernels that are planned for few rows.
- `warpgroups`: the kernel of warpgroups, launched when the kernel before has ended.
- `early`: the same kernel launched before, which copies weights while it waits for x.
- `fetch`: Triton's kernels, and beside attention and other short kernels one more, which reads the
  next words into the L2 cache.

`graph` runs the kernels of a call as XLA's command buffers, which are CUDA graphs, and `stream`
launches each by itself. Times are those of calls one after another, as the host sees them.

A way is checked against `triton`. Early launches are also checked against themselves in a graph,
bit by bit, while the kernels that write x are slow, into arrays of NaN.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from mpjax.atomic_write import atomic_write
from mpjax.bench import gemm, measure
from mpjax.kernels import QuantizedTensor, WeightFormat, add_rms_norm, gated
from mpjax.kernels.gemm import plans, triton
from mpjax.kernels.gemm.plans import Problem, WarpgroupConfig
from mpjax.kernels.gemm.shapes import QWEN3_8B, GemmShape
from mpjax.kernels.launch import Settings, first_program_id, load, store
from mpjax.kernels.launch import launch as launch_triton

FORMAT, HEAD_FORMAT = WeightFormat("uint4", 128), WeightFormat("uint8", 128)
HIDDEN, TILE = 4096, 256
PROGRAMS = 48  # of a kernel that fetches: those of other kernels need multiprocessors, too
HEAD = GemmShape("qwen3-8b.head", HIDDEN, 151936)
EPSILON = 1e-6
GATE = 2e-2  # of a chain in bfloat16, whose ways add up in other orders
# Steps of the loop that makes a kernel slow, some 400 of which take a microsecond: in place of
# attention, and where x comes late.
ATTENTION, DELAY = 2000, 20_000
ROUNDS, CALLS, STRESS = 7, 20, 10


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a chain.

    configs: of the warpgroups' kernel, by the name of the shape; None: Triton's kernel.
    ahead: the blocks whose words are copied before the kernel before has ended, by the name of the
        matrix; None: kernels of warpgroups are not launched early.
    graph: whether kernels are launched as command buffers. pdl: whether XLA launches its own early.
    fetched: megabytes of words that kernels beside others read into the L2 cache, by the name of
        the matrix; None: there are no such kernels.
    concurrent: whether kernels of a graph run at the same time if none needs another's results.
    """

    name: str
    configs: Mapping[str, WarpgroupConfig] | None
    graph: bool
    pdl: bool = True
    fetched: Mapping[str, int] | None = None
    concurrent: bool = False
    ahead: Mapping[str, int] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options of XLA."""
        options: dict[str, Any] = {"xla_gpu_enable_pdl": self.pdl}
        if not self.graph:
            options["xla_gpu_enable_command_buffer"] = ""
        if self.concurrent:
            options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
        return options


class Layer(NamedTuple):
    """The weights of a layer: two norms and four products."""

    norms: tuple[jax.Array, jax.Array]
    qkv: QuantizedTensor
    output: QuantizedTensor
    gate_up: QuantizedTensor
    down: QuantizedTensor


class State(NamedTuple):
    """The terms that are added to the residual stream next, the stream, and what is fetched."""

    terms: jax.Array
    stream: jax.Array
    fetched: jax.Array


# Tiles of 128 or 96 programs: all of a product run at once, beside the kernel before it.
CONFIGS = {
    "qwen3-8b.qkv": WarpgroupConfig(8, 2, 1, 2),
    "qwen3-8b.output": WarpgroupConfig(8, 2, 2, 2),
    "qwen3-8b.gate_up": WarpgroupConfig(8, 3, 1),
    "qwen3-8b.down": WarpgroupConfig(8, 2, 2, 2),
    "qwen3-8b.head": WarpgroupConfig(8, 4, 1),
}
FETCHED = {"qkv": 8, "output": 8, "gate_up": 8, "down": 6}  # what is read in some 2 to 6 µs
SHALLOW = {"qkv": 4, "output": 4, "gate_up": 4, "down": 4, "head": 4}  # the slots of the rule
DEEP = {"qkv": 8, "output": 4, "gate_up": 7, "down": 8, "head": 6}


# The first is the present one, with which others are compared.
WAYS = (
    Way("triton graph", None, graph=True),
    Way("warpgroups graph", CONFIGS, graph=True, pdl=False),
    Way("early stream", CONFIGS, graph=False, ahead=DEEP),
    Way("warpgroups stream", CONFIGS, graph=False),
    Way("triton stream", None, graph=False),
    Way("fetch concurrent", None, graph=True, fetched=FETCHED, concurrent=True),
    Way("triton concurrent", None, graph=True, concurrent=True),
    Way("early stream, shallow", CONFIGS, graph=False, ahead=SHALLOW),
    Way("early graph", CONFIGS, graph=True, ahead=DEEP),
    Way("fetch concurrent, serial kernels", None, True, False, FETCHED, concurrent=True),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all ways, and writes them; exit code 1 if one is wrong."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1)
    given = parser.parse_args(arguments)
    measure.require_gpu()
    results: dict[str, Any] = measure.stamp() | {"rows": given.rows, "layers": given.layers}
    chains = {"layer": layers_of(given.layers), "head": heads_of(2)}
    for name, weights in chains.items():
        results[name] = []
        for row in run(name, weights, given.rows):
            results[name].append(row)
            print(json.dumps({"chain": name} | row), flush=True)
            atomic_write(given.out, json.dumps(results, indent=2) + "\n")
    rows = [row for name in chains for row in results[name]]
    if wrong := [row["way"] for row in rows if not row["is_right"]]:
        raise SystemExit(f"wrong results: {', '.join(wrong)}")


def layers_of(count: int) -> list[Layer]:
    """Layers of random weights, equal ones at different places in memory."""
    keys = jax.random.split(jax.random.key(0), len(QWEN3_8B))
    matrices = [
        gemm.random_weight(key, shape, FORMAT) for key, shape in zip(keys, QWEN3_8B, strict=True)
    ]
    norms = (jnp.ones((HIDDEN,), jnp.bfloat16),) * 2
    layer = Layer(norms, *matrices)
    return [jax.tree.map(jnp.copy, layer) for _ in range(count)]


def heads_of(count: int) -> list[Any]:
    """Norms with heads in eight bits."""
    head = gemm.random_weight(jax.random.key(1), HEAD, HEAD_FORMAT)
    pair = jnp.ones((HIDDEN,), jnp.bfloat16), head
    return [jax.tree.map(jnp.copy, pair) for _ in range(count)]


def run(chain: str, weights: Sequence[Any], rows: int) -> Any:
    """A row for each way: microseconds of a layer or head, and whether its results are right."""
    terms, stream = jax.random.normal(jax.random.key(2), (2, 1, rows, HIDDEN), jnp.bfloat16)
    start = State(terms, stream[0], jnp.zeros((PROGRAMS,), jnp.int32))
    expected = None
    for way in WAYS:
        began = time.perf_counter()
        state = like_results(chain, way, weights, start)
        call = compiled(chain, way, weights, state, delay=0)
        row: dict[str, Any] = {"way": way.name, "compile_seconds": time.perf_counter() - began}
        end = call(weights, state)
        found = end.terms.astype(jnp.float32).sum(0), end.stream
        expected = found if expected is None else expected
        row["relative_error"] = max(map(relative_error, found, expected))
        row["is_right"] = row["relative_error"] < GATE
        row |= {key: each / len(weights) for key, each in times(call, weights, state).items()}
        if way.name == "early stream":
            row["stress"] = stress(chain, way, weights, state)
            row["is_right"] &= row["stress"]["different_bits"] == 0
        yield row


def like_results(chain: str, way: Way, weights: Sequence[Any], state: State) -> State:
    """A state with one term as a way's results have it: with zeros for the other terms."""
    function = _function(chain, way, delay=0)
    # The terms of the results depend on the weights alone, not on those that a chain begins with.
    terms = jax.eval_shape(function, weights, state).terms
    zeros = jnp.zeros(terms.shape, terms.dtype)
    return state._replace(terms=zeros.at[0].set(state.terms[0].astype(terms.dtype)))


def compiled(
    chain: str, way: Way, weights: Sequence[Any], state: State, *, delay: int
) -> jax.stages.Compiled:
    """The program of a chain. delay: of the kernels that write x; see `slow_sum`."""
    function = jax.jit(_function(chain, way, delay), compiler_options=way.options)
    return function.lower(weights, state).compile()


def _function(chain: str, way: Way, delay: int) -> Any:
    step = layer if chain == "layer" else head
    return functools.partial(_chain, functools.partial(step, way, delay))


def _chain(step: Any, weights: Sequence[Any], state: State) -> State:
    for each in weights:
        state = step(each, state)
    return state


def layer(way: Way, delay: int, weights: Layer, state: State) -> State:
    """A layer without its attention."""
    multiply = functools.partial(product, way)
    fetched = state.fetched

    def fetch_beside(after: jax.Array, *names: str) -> None:
        nonlocal fetched
        if way.fetched is not None:
            for name in names:
                fetched = fetch(getattr(weights, name).words, after, fetched, way.fetched[name])

    fetch_beside(state.terms, "qkv")
    stream, x = norm(state.terms, state.stream, weights.norms[0], delay)
    terms = multiply("qwen3-8b.qkv", x, weights.qkv)
    fetch_beside(terms, "output", "gate_up")
    terms = multiply("qwen3-8b.output", attended(terms, delay), weights.output)
    fetch_beside(terms, "gate_up")
    stream, x = norm(terms, stream, weights.norms[1], delay)
    terms = multiply("qwen3-8b.gate_up", x, weights.gate_up)
    fetch_beside(terms, "down")
    # XLA's own kernel, the default, doesn't let the next one begin early.
    implementation: Any = None if way.configs is None else "triton"
    inner: Any = gated(terms, "silu", dtype=x.dtype, implementation=implementation)
    return State(multiply("qwen3-8b.down", inner, weights.down), stream, fetched)


def head(way: Way, delay: int, weights: Any, state: State) -> State:
    """A norm and a head, whose first logits are the terms of the next norm."""
    stream, x = norm(state.terms, state.stream, weights[0], delay)
    logits = product(way, "qwen3-8b.head", x, weights[1])
    return state._replace(terms=slow_sum(logits, delay, is_poisoned=delay > 0)[None], stream=stream)


def attended(terms: jax.Array, delay: int) -> jax.Array:
    """A stand-in for attention: the sum of terms, after as long as attention takes."""
    return slow_sum(terms, delay or ATTENTION, is_poisoned=delay > 0)


def norm(
    terms: jax.Array, stream: jax.Array, weight: jax.Array, delay: int
) -> tuple[jax.Array, jax.Array]:
    """The residual stream with terms, and its norm, which comes late if there is a delay."""
    found: Any = add_rms_norm(terms, stream, weight, EPSILON)
    stream, x = found
    return stream, slow_sum(x[None], delay, is_poisoned=True) if delay else x


def product(way: Way, name: str, x: jax.Array, weight: QuantizedTensor) -> jax.Array:
    """The terms of x · weight."""
    if way.configs is None:
        config = plans.triton_config_of(Problem.of(len(x), weight))
        return triton.matmul_terms(x, weight, config, x.dtype)
    from mpjax.kernels.gemm.warpgroups import launch  # here, as importing it takes a while

    blocks = 0 if way.ahead is None else way.ahead[name.split(".")[1]]
    return launch.matmul_terms(x, weight, way.configs[name], x.dtype, ahead=blocks)


@functools.partial(jax.jit, static_argnums=(1,), static_argnames=("is_poisoned", "interpret"))
def slow_sum(
    terms: jax.Array, steps: int, *, is_poisoned: bool, interpret: bool = False
) -> jax.Array:
    """The sum of terms [splits, rows, N ≥ 4096], of the first 4096 channels, in bfloat16.

    steps: of a loop before the sum is written. is_poisoned: whether the array that the sum is
        written to is NaN until then.
    """
    rows = terms.shape[1]
    out = jax.ShapeDtypeStruct((rows, HIDDEN), jnp.bfloat16)
    poison = [jnp.full(out.shape, jnp.nan, out.dtype)] if is_poisoned else []
    result: jax.Array = launch_triton(
        functools.partial(_slow_sum_kernel, steps),
        terms,
        *poison,
        out_shape=out,
        grid=(HIDDEN // TILE, rows),
        settings=Settings("slow_sum", warps=1),
        interpret=interpret,
        aliases={1: 0} if is_poisoned else None,
    )
    return result


def _slow_sum_kernel(steps: int, terms: Any, *references: Any) -> None:
    out = references[-1]
    channel = first_program_id() * TILE + jnp.arange(TILE)
    row = pl.program_id(1)
    total = jnp.zeros((TILE,), jnp.float32)
    for split in range(terms.shape[0]):
        total += load(terms.at[split, row, channel]).astype(jnp.float32)
    # The loop ends near 2, or at the total, which the compiler does not know.
    end = jax.lax.fori_loop(0, steps, lambda _, x: x * 0.5 + 1.0, total)
    total += jnp.where(jnp.abs(end) < jnp.inf, 0.0, 1.0)
    store(out.at[row, channel], total.astype(out.dtype))


@functools.partial(jax.jit, static_argnums=(3,), static_argnames="interpret")
def fetch(
    words: jax.Array,
    after: jax.Array,
    before: jax.Array,
    megabytes: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Reads the first megabytes of words, so that they are in the L2 cache; sums [PROGRAMS].

    after: an array that is there before. before: the last call's result, so that calls don't run at
        the same time.
    """
    tile = 8192
    steps = min(megabytes * 10**6, words.nbytes) // (2 * tile * PROGRAMS)
    return launch_triton(
        functools.partial(_fetch_kernel, steps, tile),
        words.reshape(-1),
        after.reshape(-1),
        before,
        out_shape=jax.ShapeDtypeStruct((PROGRAMS,), jnp.int32),
        grid=(PROGRAMS,),
        settings=Settings("fetch", warps=4),
        interpret=interpret,
    )


def _fetch_kernel(steps: int, tile: int, words: Any, after: Any, before: Any, out: Any) -> None:
    program = first_program_id()

    def read(step: jax.Array, total: jax.Array) -> jax.Array:
        place = (step * PROGRAMS + program) * tile + jnp.arange(tile)
        return total + load(words.at[place]).astype(jnp.int32)

    sums = jax.lax.fori_loop(0, steps, read, jnp.zeros((tile,), jnp.int32))
    is_there = load(after.at[jnp.arange(1)]).astype(jnp.float32).max() < jnp.inf
    total = sums.sum() + load(before.at[program + jnp.arange(1)]).max() + is_there.astype(jnp.int32)
    store(out.at[program + jnp.arange(1)], total[None])


def relative_error(found: Any, expected: Any) -> float:
    """The norm of the difference over that of `expected`; NaN if there is any."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def times(call: jax.stages.Compiled, weights: Sequence[Any], state: State) -> dict[str, float]:
    """Microseconds of a call: until its results are there, and until it is launched."""
    found, launched = [], []
    for _ in range(ROUNDS):
        jax.block_until_ready(state)
        began = time.perf_counter()
        for _ in range(CALLS):
            state = call(weights, state)
        launched.append((time.perf_counter() - began) / CALLS * 1e6)
        jax.block_until_ready(state)
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    kernels = measure.kernel_microseconds(call, weights, state)
    return {
        "microseconds": statistics.median(found[1:]),
        "launch_microseconds": statistics.median(launched[1:]),
        "sum_of_kernels_microseconds": sum(kernels.values()),
    }


def stress(chain: str, way: Way, weights: Sequence[Any], state: State) -> dict[str, Any]:
    """Calls of slow kernels whose bits differ from those of a graph, which waits for each kernel.

    A graph has the same kernels, and no early launches of warpgroups.
    """
    late = compiled(chain, way, weights, state, delay=DELAY)
    serial = dataclasses.replace(way, graph=True, pdl=False)
    expected = bits(compiled(chain, serial, weights, state, delay=DELAY)(weights, state))
    results = [bits(late(weights, state)) for _ in range(STRESS)]
    return {
        "calls": STRESS,
        "different_bits": sum(each != expected for each in results),
    }


def bits(state: State) -> bytes:
    """The bytes of a state."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in state)


if __name__ == "__main__":
    main()

"""Kernels of programs that read prompts, in an engine and in a static batch, on a GPU.

python -m benchmarks.extend OUT

Reads prompts of Qwen3-8B's shapes with random weights and four layers, in W4A16KV8, and prints for
each program the GPU time of its kernels, and the time between its calls in which no kernel runs. A
program of the engine reads 4 prompts of 1024 tokens, as if many came at once; or a piece of a late
prompt of 32768 tokens, from some positions on. Beside these, the programs of `generate_tokens` read
a batch of 32 prompts of 1024; its times are divided by 8, to be those of as many tokens as a whole
chunk. The kernels of the head are part of all programs. It takes a
minute.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.bench import measure, tables
from mpjax.bench.random_model import random_model
from mpjax.decoding import jit_prefill
from mpjax.decoding_state import Limits
from mpjax.engine import filling
from mpjax.engine.compiled import Programs
from mpjax.engine.engine import SEQUENCES
from mpjax.engine.programs import Reading
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import EngineState
from mpjax.models import DecoderConfig, Qwen3
from mpjax.models.presets import QWEN3_8B
from mpjax.precision import Precision
from mpjax.random_keys import row_keys
from mpjax.sampling import Sampling

PRECISION, LAYERS = "W4A16KV8", 4
ROUNDS = 3  # of kernel times, and as many calls in a row for the time between kernels
CHUNK, PROMPT, NEW = 4096, 1024, 512
LATE, AT, PIECES = 32768, (0, 8192, 28672), (256, 1024)
STATIC = 32  # rows of the static batch
LISTED = 15  # kernels of a program that are printed
# The group of a kernel is the first whose expression is found in its name.
GROUPS = {
    "attention": "attention|cudnn|fmha|flash",
    "append": "append|flush",
    "norms and gates": "norm|gated",
    "products": "matmul|dequantize|gemm|nvjet|cutlass|cublas|xmma",
}
OTHER = "other"
HEADERS = ("program", "all", *GROUPS, OTHER, "gaps")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of an engine that reads pieces of as many tokens of some prompts.

    rows: prompts, the others are empty. tokens: of a piece. start: the position of its first token.
    """

    rows: int
    tokens: int
    start: int = 0

    @property
    def name(self) -> str:
        """The numbers, and where pieces begin behind others the position."""
        return f"{self.rows} x {self.tokens}" + (f" at {self.start}" if self.start else "")


@dataclasses.dataclass
class Bench:
    """An engine's state and programs, without a planner: slot i has the i-th pages.

    slots, most: rows that may run, and the most tokens of each. rows: those that have pages.
    """

    lm: mpjax.LanguageModel
    slots: int
    most: int
    rows: int

    def __post_init__(self) -> None:
        self.entries = -(-self.most // self.lm.page_size)
        self.pages = 1 + self.rows * self.entries
        sizes = Sizes(self.slots, self.pages, self.lm.page_size, chunk=CHUNK, sequences=SEQUENCES)
        self.programs = Programs(self.lm.model, sizes)
        self.state = EngineState.create(self.lm, self.slots, self.pages, self.most)

    def read(self, case: Case) -> jax.Array:
        """Runs the program of a case, and returns the tokens that it draws."""
        self.state, drawn, _ = self.programs.extend(
            self.state, self._reading(case), greedy=True, scored=False
        )
        tokens: jax.Array = drawn.tokens
        return tokens

    def _reading(self, case: Case) -> Reading:
        size = {"slots": self.slots, "entries": self.entries}
        empty = filling.reading([], tokens=case.rows * case.tokens, rows=SEQUENCES, **size)
        own, ids = np.arange(case.rows), np.random.default_rng(case.start)

        def put(array: np.ndarray, values: Any) -> np.ndarray:
            array[: case.rows] = values
            return array

        tables = 1 + own[:, None] * self.entries + np.arange(self.entries)[None]
        return dataclasses.replace(
            empty,
            tokens=ids.integers(0, self.lm.config.vocab_size, len(empty.tokens), np.int32),
            slots=put(empty.slots, own),
            starts=put(empty.starts, case.start),
            counts=put(empty.counts, case.tokens),
            tables=put(empty.tables, tables),
            is_first=put(empty.is_first, case.start == 0),
            is_last=put(empty.is_last, True),
        )


def measured(name: str, call: Callable[[], jax.Array], share: float = 1.0) -> dict[str, Any]:
    """A row: kernel times in microseconds, by name and group, and the time between kernels.

    share: what all times are multiplied with.
    """
    call().block_until_ready()
    kernels = measure.kernel_microseconds(measure.Unjitted(call), iterations=ROUNDS)
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        last = call()
    last.block_until_ready()
    seconds = (time.perf_counter() - begin) / ROUNDS
    merged = {kernel: each * share for kernel, each in measure.merge_names(kernels).items()}
    total = sum(merged.values())
    return {
        "program": name,
        "microseconds": total,
        "gaps_microseconds": max(0.0, seconds * 1e6 * share - total),
        "groups": grouped(merged),
        "kernel_microseconds": merged,
    }


def grouped(kernels: Mapping[str, float]) -> dict[str, float]:
    """The sums of kernel times by GROUPS, and of OTHER kernels."""
    sums: dict[str, float] = collections.defaultdict(float)
    for kernel, each in kernels.items():
        found = (group for group, names in GROUPS.items() if re.search(names, kernel.lower()))
        sums[next(found, OTHER)] += each
    return {group: sums[group] for group in (*GROUPS, OTHER)}


def run(config: DecoderConfig) -> Iterator[dict[str, Any]]:
    """Measures the static batch and all cases; yields a row each."""
    precision = Precision.parse(PRECISION)
    model = random_model(Qwen3, config, precision.weights)
    lm = mpjax.LanguageModel(model, None, precision.kv, Path())
    yield measured(f"static, {STATIC} x {PROMPT}", *_static(lm))
    bench = Bench(lm, slots=256, most=PROMPT + NEW, rows=CHUNK // PROMPT)
    at_once = Case(CHUNK // PROMPT, PROMPT)
    yield measured(at_once.name, functools.partial(bench.read, at_once))
    bench = Bench(lm, slots=64, most=LATE + 8, rows=1)
    for start in range(0, LATE, CHUNK):
        whole = Case(1, CHUNK, start)
        bench.read(whole)
        if start not in AT:
            continue
        yield measured(whole.name, functools.partial(bench.read, whole))
        for tokens in PIECES:
            piece = Case(1, tokens, start)
            yield measured(piece.name, functools.partial(bench.read, piece))


def _static(lm: mpjax.LanguageModel) -> tuple[Callable[[], jax.Array], float]:
    """The call that reads a static batch, and the share of it that has CHUNK tokens."""
    draw = np.random.default_rng(0).integers(0, lm.config.vocab_size, (STATIC, PROMPT))
    tokens, lengths = jnp.asarray(draw, jnp.int32), jnp.full(STATIC, PROMPT, jnp.int32)
    sampling, stop_ids = Sampling(stop_ids=()).split(())
    limits, keys = Limits.of(STATIC, stop_ids, NEW, NEW), row_keys(np.arange(STATIC))
    cache = lm.model.create_cache(STATIC, PROMPT + NEW, lm.kv_format, lm.page_size)

    def read() -> jax.Array:
        nonlocal cache
        empty = dataclasses.replace(cache, lengths=jnp.zeros(STATIC, jnp.int32))
        state = jit_prefill(lm.model, tokens, lengths, empty, keys, sampling, limits)
        cache = state.cache
        return state.tokens

    return read, CHUNK / (STATIC * PROMPT)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row of the table, in the order of HEADERS; milliseconds."""
    numbers = (row["microseconds"], *row["groups"].values(), row["gaps_microseconds"])
    return [row["program"], *(f"{number / 1e3:.2f}" for number in numbers)]


def kernel_lines(row: Mapping[str, Any]) -> list[str]:
    """The longest kernels of a program, with their microseconds."""
    kernels = list(row["kernel_microseconds"].items())[:LISTED]
    return [f"{each:10.1f}  {name}" for name, each in kernels]


def main(given: Sequence[str]) -> int:
    """Measures, prints and writes extend.json to a folder; returns 2 for wrong usage, else 0."""
    if len(given) != 1:
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    measure.require_gpu()
    rows = []
    for row in run(dataclasses.replace(QWEN3_8B, layers=QWEN3_8B.layers[:LAYERS])):
        rows.append(row)
        print("\n".join([row["program"], *kernel_lines(row)]), flush=True)
        result = {"precision": PRECISION, "layers": LAYERS, "results": rows}
        measure.save("extend", result, Path(given[0]))
    tables.show(f"Milliseconds of {LAYERS} layers", HEADERS, map(cells, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

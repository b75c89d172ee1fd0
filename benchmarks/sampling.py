"""Time of drawing a token for each row, with thresholds of top-k and top-p by a search and a sort.

python -m benchmarks.sampling OUT                    on a GPU, into the folder OUT
python -m benchmarks.sampling OUT --rows 1,256

Logits are those of Qwen3-8B's vocabulary. Each draw follows the one before, in one program, as in
decoding. `kernels` is the sum of the kernels of a draw, and `step` the time from draw to draw. The
draws with temperature 1, and those of greedy rows, show what the filters add.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from mpjax import sampling
from mpjax.bench import measure
from mpjax.random_keys import row_keys, step_keys
from mpjax.sampling import Sampling

VOCABULARY = 151_936
STEPS, ROUNDS = 16, 5  # draws of a program, and how often it runs
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 50},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "both": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
}
HEADERS = ("rows", "drawn with", "by", "kernels", "step", "same tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all cases, and writes them."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", default="1,16,64,256")
    given = parser.parse_args(arguments)
    measure.require_gpu()
    rows = []
    for row in run([int(text) for text in given.rows.split(",")]):
        rows.append(row)
        print(" | ".join(cells(row)), flush=True)
    print(measure.save("sampling", {"results": rows}, given.output))


def run(batches: Sequence[int], vocabulary: int = VOCABULARY) -> Iterator[dict[str, Any]]:
    """A row for each number of rows and way to draw, and for each way to find thresholds."""
    cases = [
        (batch, name, by)
        for batch, (name, fields) in itertools.product(batches, WAYS.items())
        for by in (("search", "sort") if len(fields) > 1 else ("",))
    ]
    logits = {batch: _logits(batch, vocabulary) for batch in batches}
    programs = []
    for batch, name, by in cases:  # traced in turn: a patch is the whole process's
        drawing = functools.partial(_draws, sampling=Sampling(**WAYS[name]))
        with mock.patch.object(sampling, "_filtered", _by_sort if by == "sort" else _SEARCH):
            programs.append(measure.serial_jit(lambda *x, f=drawing: f(*x)).lower(*logits[batch]))
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda program: program.compile(), programs))
    tokens: dict[Any, jax.Array] = {}
    for (batch, name, by), program in zip(cases, compiled, strict=True):
        drawn = program(*logits[batch])
        kernels = measure.microseconds(program, *logits[batch], iterations=3) / STEPS
        yield {
            "rows": batch,
            "drawn": name,
            "by": by,
            "kernels_microseconds": kernels,
            "step_microseconds": _microseconds(functools.partial(program, *logits[batch])) / STEPS,
            "same_tokens": bool((tokens.setdefault((batch, name), drawn) == drawn).all()),
        }


def cells(row: dict[str, Any]) -> list[str]:
    """The texts of a row of the table, in the order of HEADERS."""
    times = (f"{row[name]:.1f} µs" for name in ("kernels_microseconds", "step_microseconds"))
    return [str(row["rows"]), row["drawn"], row["by"], *times, str(row["same_tokens"])]


def _logits(batch: int, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """Logits, and keys of rows."""
    key = jax.random.key(batch)
    return 3 * jax.random.normal(key, (batch, vocabulary)), row_keys(range(batch))


def _draws(logits: jax.Array, keys: jax.Array, *, sampling: Sampling) -> jax.Array:
    """The tokens of STEPS draws, int32 [batch]: the sums of each row's."""

    def draw(step: jax.Array, total: jax.Array) -> jax.Array:
        # Logits that depend on the draw before, as a model's do.
        moved = logits + total[:, None].astype(jnp.float32) * 1e-9
        return total + _SAMPLE(moved, step_keys(keys, total + step), sampling)

    return jax.lax.fori_loop(0, STEPS, draw, jnp.zeros(len(logits), jnp.int32))


def _microseconds(run: Callable[[], jax.Array]) -> float:
    """The median time of a run."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run().block_until_ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


_SEARCH, _SAMPLE = sampling._filtered, sampling.sample


def _by_sort(logits: jax.Array, fields: Sampling, divided: bool = False) -> jax.Array:
    """The logits that `_filtered` returns for temperature 1, top-k and top-p, found by one sort."""
    ranked = jnp.sort(logits, axis=-1, descending=True)
    least = jnp.full((len(logits), 1), -jnp.inf)
    if fields.top_k is not None:
        least = ranked[:, fields.top_k - 1, None]
    if fields.top_p is not None:
        kept = jnp.where(ranked >= least, ranked, -jnp.inf)
        probabilities = jax.nn.softmax(kept, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        inside = jnp.where(before < fields.top_p, kept, jnp.inf)
        least = jnp.maximum(least, inside.min(-1, keepdims=True))
    return jnp.where(logits >= least, logits, -jnp.inf)


if __name__ == "__main__":
    main()

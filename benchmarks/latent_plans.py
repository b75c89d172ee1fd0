"""Times configurations of attention over latents, to choose those of its rule.

`python -m benchmarks.latent_plans --shape b8-h16/1-d512+64-c8192 --format KV16`
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import jax

from mpjax.bench import latent, measure
from mpjax.bench.cached_bytes import cached_bytes
from mpjax.kernels import KVFormat, device
from mpjax.kernels.attention.plans import AttentionConfig
from mpjax.kernels.attention.shapes import AttentionShape
from mpjax.kernels.latent.api import by_triton
from mpjax.kernels.masks import Masks


def main() -> None:
    """Prints the time of each configuration that compiles, and the floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="b8-h16/1-d512+64-c8192")
    parser.add_argument("--format", default="KV16")
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--keys", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--resident", type=float, nargs="+", default=[1, 2])
    options = parser.parse_args()
    shape = AttentionShape.parse(options.shape)
    queries, rotated, pages, span = latent.call_of(shape, KVFormat.parse(options.format), 128)
    span = span.read("latent_plans", queries.shape[:-2])
    nbytes = cached_bytes(pages, shape.lengths)
    floor = measure.floor_microseconds([pages], nbytes)
    print(f"{shape.name}, {options.format}: floor {floor:.1f} µs of {nbytes / 1e6:.1f} MB")
    choices = options.rows, options.keys, options.warps, options.stages, options.resident
    for rows, keys, warps, stages, resident in itertools.product(*choices):
        programs = shape.batch * -(-shape.query_heads // rows)
        splits = max(1, int(resident * device.multiprocessors() // programs))
        config = AttentionConfig(rows, keys, splits, warps, stages)

        def attend(*call: Any, config: AttentionConfig = config) -> jax.Array:
            queries, rotated, pages, span = call
            masks = Masks(latent.SCALE)
            return by_triton(queries, rotated, pages, span, masks, config)

        try:
            times = measure.kernel_microseconds(jax.jit(attend), queries, rotated, pages, span)
        except Exception as error:  # a configuration without enough memory
            print(f"{config}: {' '.join(str(error).split())[:100]}", flush=True)
            continue
        total = sum(times.values())
        each = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"{config}: {total:.1f} µs, {total / floor:.2f} × floor ({each})", flush=True)


if __name__ == "__main__":
    main()

"""Measures what rollouts ask of an engine: python -m benchmarks.rollouts [--save FOLDER].

Updates of Qwen3-8B's shapes (by default W4A16KV16) from a model in bfloat16 on the same device, the
memory that an update takes beside both, and sleep and wake, also with the weights. `--small` takes
a small shape, for a CPU. `--save` writes rollouts.json to a folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
from flax import nnx

import mpjax
from mpjax.bench import measure
from mpjax.bench.random_model import random_model
from mpjax.models import Qwen3
from mpjax.models.presets import QWEN3_8B
from mpjax.precision import Precision

ROUNDS = 5
SMALL = dataclasses.replace(
    QWEN3_8B,
    vocab_size=2048,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    layers=QWEN3_8B.layers[:2],
    stop_ids=(),
)


def seconds(call: Callable[[], object], lm: mpjax.LanguageModel) -> float:
    """The seconds of a call, until the model's arrays are ready."""
    begin = time.perf_counter()
    call()
    jax.block_until_ready(jax.tree.leaves(nnx.state(lm.model)))
    return time.perf_counter() - begin


def most_bytes() -> int:
    """The device's peak bytes in use so far; 0 if unknown."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0))


def main(text: str, *, is_small: bool) -> dict[str, float]:
    """Prints a line for each measurement, and returns them."""
    result: dict[str, float] = {}
    precision, config = Precision.of(text), SMALL if is_small else QWEN3_8B
    lm = mpjax.LanguageModel(
        random_model(Qwen3, config, precision.weights), None, precision.kv, Path()
    )
    trainer = nnx.state(random_model(Qwen3, config, None, seed=1))
    both, before = sum(x.nbytes for x in jax.live_arrays()), most_bytes()
    print(f"both models: {both / 1e9:.2f} GB, the most so far {before / 1e9:.2f} GB")
    print(f"first update: {seconds(lambda: mpjax.update(lm, trainer), lm):.2f} s, with compiling")
    if most := most_bytes():
        result["most_megabytes"] = (most - max(both, before)) / 1e6
        print(f"most bytes beside both models: {result['most_megabytes']:.0f} MB or less")
    for scales in ("new", "keep"):
        call = functools.partial(mpjax.update, lm, trainer, scales=scales)
        call()
        found = [seconds(call, lm) for _ in range(ROUNDS)]
        result[f"update_{scales}_milliseconds"] = 1e3 * min(found)
        print(f"update, {scales} scales: {1e3 * min(found):.1f} ms")
    with mpjax.Engine(lm, slots=4, max_tokens=64, cache_memory=0.2) as engine:
        prompt = list(range(1, 30))
        before_sleep = engine.submit(prompt, max_new_tokens=8).result().tokens
        for weights_too in (False, True):
            engine.sleep(weights=weights_too)
            used = sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")
            wake = seconds(engine.wake, lm)
            same = engine.submit(prompt, max_new_tokens=8).result().tokens == before_sleep
            what = f"asleep, weights={weights_too}: {used / 1e9:.2f} GB, wake {wake:.2f} s"
            print(f"{what}, equal tokens: {same}")
            result["wake_weights_seconds" if weights_too else "wake_seconds"] = wake
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts")
    parser.add_argument("--precision", default="W4A16KV16", help="by default %(default)s")
    parser.add_argument("--small", action="store_true", help="a small shape, for a CPU")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="writes rollouts.json")
    options = parser.parse_args()
    found = main(options.precision, is_small=options.small)
    if options.save:
        named = {"precision": options.precision, "is_small": options.small}
        measure.save("rollouts", named | found, options.save)

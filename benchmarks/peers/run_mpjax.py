"""Measures an engine of mpjax: python -m benchmarks.peers.run_mpjax FOLDER OUT.json."""

from __future__ import annotations

import argparse
import math

from benchmarks.peers import loads


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the engine's own options."""
    parser.add_argument("--precision", default="A16KV16", help="the default has a 16-bit cache")
    parser.add_argument("--slots", type=int, default=512)


def start(given: argparse.Namespace) -> loads.Engine:
    """Starts an engine and compiles all its programs."""
    import mpjax  # here, so that the seconds of the start contain it
    from mpjax.bench import measure

    lm = mpjax.load(given.folder, precision=given.precision)
    engine = mpjax.Engine(lm, slots=given.slots, max_tokens=loads.MOST_TOKENS, max_gap=math.inf)
    engine.compile()

    def generate(prompts: list[list[int]], new_tokens: list[int]) -> None:
        handles = [
            engine.submit(prompt, max_new_tokens=new, sampling={"temperature": 0, "stop_ids": ()})
            for prompt, new in zip(prompts, new_tokens, strict=True)
        ]
        while engine.has_work:
            engine.step()
        assert [len(handle.tokens) for handle in handles] == new_tokens

    stamp = measure.stamp()
    about = {"engine": "mpjax", "weights": lm.precision, "device": stamp["device"]}
    return loads.Engine(generate, about, stamp["versions"])


if __name__ == "__main__":
    loads.main(__doc__ or "", options, start)

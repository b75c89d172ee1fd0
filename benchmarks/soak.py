"""Runs random traffic through an engine: python -m benchmarks.soak TOKENS [--large] ...

Requests differ in length, sampling, priority, candidates and in what they share. Some are
cancelled, and the cache is too small for all that run, so that some make room for others. Between
rounds, when no request is left, all pages have to be free, few programs compiled, and memory may
not grow. Greedy requests of each round are repeated when the engine does nothing else, and on a CPU
have to say the same.

TOKENS: new tokens until the end. --large: Qwen3-8B's shapes in W4A16KV8 instead of a small model.
--slots: requests that run at once, 64 if --large and else 8. --seed: of the traffic. --output: a
JSON file, which is written after each round, with the device, versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from mpjax.bench import measure
from mpjax.bench.random_model import random_model
from mpjax.engine.handle import Handle
from mpjax.engine.state import cache_bytes
from mpjax.files.atomic_write import atomic_write
from mpjax.kernels import device
from mpjax.models import Qwen3
from mpjax.models.llama import llama_layers
from mpjax.models.presets import QWEN3_8B
from mpjax.precision import Precision

ROUND = 64  # requests of a round
REPEATED = 4  # greedy requests of a round that are repeated
WARM_ROUNDS = 3  # rounds in which memory may grow, as in any that compiles a program
COLLECTED = 8  # rounds between garbage collections, which take as long as a round
GROWTH = 64 << 20  # bytes by which the process may grow: allocators keep some memory
SMALL = dataclasses.replace(
    QWEN3_8B,
    vocab_size=512,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    layers=llama_layers((None,), 128, qk_norm=True),
    max_position_embeddings=512,
    stop_ids=(5,),
    dtype="float32",
)


def make_engine(*, large: bool, slots: int | None = None) -> mpjax.Engine:
    """An engine whose cache holds half of the slots' maximum. slots: 64 or 8 by default."""
    precision = Precision.parse("W4A16KV8" if large else "W16A16KV4")
    # Attention kernels need 16-bit queries; on a CPU, float32 makes results reproducible.
    small = dataclasses.replace(SMALL, dtype="bfloat16") if device.on_gpu() else SMALL
    model = random_model(Qwen3, QWEN3_8B if large else small, precision.weights)
    page_size, usual, longest = (64, 64, 2048) if large else (16, 8, 192)
    slots = usual if slots is None else slots
    lm = mpjax.LanguageModel(model, None, precision.kv, Path(), page_size)
    pages = slots * longest // page_size // 4
    each, fixed = cache_bytes(lm, slots)
    memory = pages * sum(each) + fixed
    chunk = 1024 if large else 64
    return mpjax.Engine(
        lm, slots=slots, cache_memory=memory, max_tokens=longest, chunk_tokens=chunk
    )


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request: its prompt's token ids, and the further arguments of Engine.submit."""

    prompt: list[int]
    options: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        """Whether the request is greedy: without a temperature."""
        return "temperature" not in self.options["sampling"]


def ask(rng: np.random.Generator, engine: mpjax.Engine, shared: Sequence[int]) -> Asked:
    """A random request, which may begin with a prefix of the shared ids."""
    vocabulary, longest = engine.lm.config.vocab_size, engine.max_tokens
    new = int(rng.integers(1, longest // 3))
    begin = list(shared[: int(rng.integers(0, longest // 3))]) if rng.random() < 0.5 else []
    own = rng.integers(0, vocabulary, int(rng.integers(1, longest // 3)))
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.2},
    ]
    sampling = {"stop_ids": [5, 6]} | kinds[rng.integers(len(kinds))]
    options = {"max_new_tokens": new, "sampling": sampling, "seed": int(rng.integers(2**32))}
    options |= {"priority": int(rng.integers(2))}
    if rng.random() < 0.1:
        options |= {"logprobs": 3, "prompt_logprobs": bool(rng.random() < 0.5)}
    return Asked([*begin, *own.tolist()], options)


def run_round(engine: mpjax.Engine, rng: np.random.Generator) -> int:
    """Runs ROUND requests; returns how many greedy ones differ when repeated on an idle engine."""
    shared = rng.integers(0, engine.lm.config.vocab_size, engine.max_tokens).tolist()
    asked = [ask(rng, engine, shared) for _ in range(ROUND)]
    handles: list[Handle] = []
    for one in asked:
        handles.append(engine.submit(one.prompt, **one.options))
        for _ in range(int(rng.integers(3))):
            engine.step()
        if rng.random() < 0.1:
            handles[int(rng.integers(len(handles)))].cancel()
    for _ in engine:
        pass
    pairs = zip(asked, handles, strict=True)
    finished = [pair for pair in pairs if pair[1].finish_reason != "cancelled"]
    greedy = [pair for pair in finished if pair[0].is_greedy][:REPEATED]
    again = [engine.submit(one.prompt, **one.options) for one, _ in greedy]
    return sum(
        other.result().tokens != handle.tokens
        for other, (_, handle) in zip(again, greedy, strict=True)
    )


def resident_bytes() -> int:
    """This process's resident bytes; the peak on systems without /proc."""
    path = Path("/proc/self/statm")
    if path.exists():
        return int(path.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def device_bytes() -> int:
    """The bytes of arrays on the device; 0 if unknown."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


def faults(numbers: Mapping[str, float], grown: int, differ: int) -> list[str]:
    """A sentence for each fault after a round.

    numbers: the engine's statistics. grown: bytes of growth since the warm rounds. differ: the
        number of requests whose repetition differed although it must not.
    """
    now, found = numbers, []
    if now["free_pages"] != now["pages"]:
        found.append(f"{now['pages'] - now['free_pages']} pages are lost")
    if now["running"] or now["waiting"]:
        found.append(f"{now['running']} requests run and {now['waiting']} wait, and none is left")
    if now["programs"] > 15:
        found.append(f"{now['programs']} programs were compiled, above 15")
    if grown > GROWTH:
        found.append(f"the process, or what it has on the device, has grown by {grown >> 20} MiB")
    if differ:
        found.append(f"{differ} requests say something else when they are repeated")
    return found


def soak(
    engine: mpjax.Engine, tokens: int, *, exact: bool, seed: int = 0, output: Path | None = None
) -> dict[str, Any]:
    """Runs rounds until `tokens` tokens are generated or a fault occurs; returns the results.

    exact: whether repeated requests must give equal tokens. On a GPU, rounding depends on the
        number of rows, so that near ties may be decided differently.
    seed: of the traffic. output: a JSON file to which the results are written after each round,
        with the device, versions and commit.
    """
    rng, began = np.random.default_rng(seed), time.perf_counter()
    told: dict[str, Any] = {}
    rounds = differ = grown = resident = on_device = 0
    programs = 0.0
    found: list[str] = []
    while engine.statistics()["new_tokens"] < tokens and not found:
        others = run_round(engine, rng)
        rounds, differ = rounds + 1, differ + others
        if rounds % COLLECTED == 0 or rounds <= WARM_ROUNDS:
            gc.collect()
        if rounds <= WARM_ROUNDS or engine.statistics()["programs"] > programs:
            resident, programs = resident_bytes(), engine.statistics()["programs"]
            on_device = device_bytes()
        grown = max(resident_bytes() - resident, device_bytes() - on_device)
        found = faults(engine.statistics(), grown, others if exact else 0)
        told = {
            **engine.statistics(),
            "seed": seed,
            "rounds": rounds,
            "differ": differ,
            "grown_bytes": grown,
            "seconds": time.perf_counter() - began,
            "faults": found,
        }
        if output is not None:
            atomic_write(output, json.dumps(measure.stamp() | told, indent=2) + "\n")
    return told


def main(given: list[str]) -> int:
    """Soaks an engine and prints the results as JSON; returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("tokens", type=int)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(given)
    with make_engine(large=chosen.large, slots=chosen.slots) as engine:
        how = {"exact": not device.on_gpu(), "seed": chosen.seed, "output": chosen.output}
        found = soak(engine, chosen.tokens, **how)
    print(json.dumps(found, indent=2))
    return bool(found["faults"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

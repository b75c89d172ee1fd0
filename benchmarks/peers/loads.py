"""The loads with which engines are compared, and their measurement."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

MOST_TOKENS = 8192  # of a request
SMALLEST_ID, LARGEST_ID = 1000, 150_000  # the range of prompts' ids, without special tokens
NEW = 256  # new tokens of each sequence in loads that measure decoding steps
REPEATS = 2
WARM_UP = ((1, 64), (64, 200))  # (sequences, tokens of each) of unmeasured calls at the start


class Generate(Protocol):
    """An engine: generates `new_tokens` tokens greedily after each prompt of token ids."""

    def __call__(self, prompts: list[list[int]], new_tokens: list[int]) -> None:
        """Returns once all tokens are generated."""


class Engine(NamedTuple):
    """A started engine. about: its description in results, with package versions."""

    generate: Generate
    about: dict[str, Any]
    versions: dict[str, str]


def main(
    description: str,
    options: Callable[[argparse.ArgumentParser], None],
    start: Callable[..., Engine],
) -> None:
    """The command line of a runner: starts an engine for a checkpoint and writes its results.

    options: adds the engine's own arguments. start: makes the engine from the parsed arguments.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("output", type=Path, help="the file of results")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    options(parser)
    given = parser.parse_args()
    begin = time.perf_counter()
    engine = start(given)
    found = {"start_seconds": time.perf_counter() - begin, **engine.about}
    found |= {"model": given.folder.name, "versions": engine.versions, "results": []}
    vocabulary = json.loads((given.folder / "config.json").read_text())["vocab_size"]
    for row in run(engine.generate, vocabulary, given.loads):
        found["results"].append(row)
        print(json.dumps(row), flush=True)
        given.output.write_text(
            json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def run(generate: Generate, vocabulary: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a result row for each named load."""
    draw = random.Random(1)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(SMALLEST_ID, min(vocabulary, LARGEST_ID)) for _ in range(tokens)]

    def seconds(prompts: list[list[int]], new_tokens: list[int]) -> float:
        begin = time.perf_counter()
        generate(prompts, new_tokens)
        return time.perf_counter() - begin

    # Engines compile programs at first use; that is not measured.
    for count, tokens in WARM_UP:
        generate([prompt(tokens) for _ in range(count)], [8] * count)
    for name in names:
        yield {"load": name} | LOADS[name](prompt, seconds)


Prompt = Callable[[int], list[int]]
Seconds = Callable[[list[list[int]], list[int]], float]


def _steps(rows: int, tokens: int) -> Callable[[Prompt, Seconds], dict[str, Any]]:
    """A load: `rows` sequences decode after `tokens` tokens that are in the prefix cache."""

    def measure(prompt: Prompt, seconds: Seconds) -> dict[str, Any]:
        prompts = [prompt(tokens) for _ in range(rows)]
        first = seconds(prompts, [1] * rows)
        steps = []
        for _ in range(REPEATS):
            one = seconds(prompts, [1] * rows)
            steps.append((seconds(prompts, [1 + NEW] * rows) - one) / NEW)
        return {
            "tokens_per_second": rows / min(steps),
            "step_milliseconds": [step * 1e3 for step in steps],
            "first_tokens_seconds": first,
        }

    return measure


def _requests(lengths: Callable[[], list[tuple[int, int]]]) -> Callable[..., dict[str, Any]]:
    """A load of simultaneous requests. lengths: gives their (prompt, new) token counts."""

    def measure(prompt: Prompt, seconds: Seconds) -> dict[str, Any]:
        prompts, new_tokens = zip(*lengths(), strict=True)
        took = seconds([prompt(tokens) for tokens in prompts], [*new_tokens])
        return {"tokens_per_second": sum(new_tokens) / took, "seconds": took}

    return measure


def uneven(count: int = 512) -> list[tuple[int, int]]:
    """Log-normal (prompt, new) token counts, as in `mpjax bench serve`.

    They are those of --prompt-tokens lognormal:1024:0.8:4096, --new-tokens lognormal:512:0.8:4096.
    """
    rng = np.random.default_rng(0)
    drawn = [
        np.clip(np.rint(rng.lognormal(math.log(mean) - 0.32, 0.8, count)), 1, 4096).astype(int)
        for mean in (1024, 512)
    ]
    return [(int(prompt), int(new)) for prompt, new in zip(*drawn, strict=True)]


LOADS: dict[str, Callable[[Prompt, Seconds], dict[str, Any]]] = {
    "1 after 2048": _steps(1, 2048),
    "64 after 1024": _steps(64, 1024),
    "256 × (1024 + 512)": _requests(lambda: [(1024, 512)] * 256),
    "512 uneven": _requests(uneven),
}

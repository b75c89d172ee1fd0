"""Speculation on real text: python -m benchmarks.speculation OUT.json [--model FOLDER] [...].

A model continues texts that repeat their prompt, and texts that don't, in plain decoding and with
each proposer, one prompt at a time. A result of the JSON file has the case, the proposer, tokens/s
of both, their ratio, the acceptance and the tokens per step. Models with a chat template get
requests in words, and base models a file of Python that they have begun to repeat. With --engine N
each prompt goes through an Engine of one slot, whose programs take N decoding steps. With
--rounds 0 there are no speeds, which is enough for the acceptance, on a CPU, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mpjax
from mpjax.bench import measure, tables
from mpjax.generation.speculation.spelling import head_options, parse
from mpjax.models import config as example

PROPOSERS = ("ngram:4:3", "ngram:4:2", "ngram:8:3")
ROUNDS = 3
MOST = 824  # the most tokens of a prompt; with 200 new tokens they fill whole pages
PROSE = (
    "The lighthouse had stood on the cape for two hundred years before anyone thought of writing "
    "down what its keepers had seen. Most of them could not write, and those who could had better "
    "things to do than to describe the weather."
)
FUNCTION = """def total_price(items, tax):
    total = 0
    for item in items:
        price = item["price"]
        count = item["count"]
        total = total + price * count
    total = total * (1 + tax)
    return round(total, 2)


def cheapest(items):
    best = None
    for item in items:
        if best is None or item["price"] < best["price"]:
            best = item
    return best
"""
REQUESTS = {
    "edit": f"Add a docstring to each function, and repeat all else as it is:\n\n{FUNCTION}",
    "quote": f"Repeat this text word by word, without changes:\n\n{PROSE}",
    "answer": f"{PROSE}\n\nFor how long had the lighthouse stood? Quote the sentence.",
    "story": "Write a story about a fisherman who finds a letter.",
    "advice": "How do I learn to play the piano as an adult?",
}
COLUMNS: tables.Columns = {
    "model": "{model}",
    "precision": "{precision}",
    "text": "{case}",
    "temperature": "{temperature:g}",
    "proposer": "{proposer}",
    "plain tokens/s": "{plain_tokens_per_second:.0f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "×": "{speed_up:.2f}",
    "tokens per step": "{tokens_per_step:.2f}",
    "accepted": "{acceptance:.0%}",
    "proposed per step": "{proposed_per_step:.2f}",
}
REPEATING = ("edit", "quote", "answer", "repeat", "rename")


def prompts(lm: mpjax.LanguageModel) -> dict[str, Any]:
    """Case → prompt, for a model; the answers to those in REPEATING repeat the prompt."""
    tokenizer = lm.require_tokenizer()
    if tokenizer.chat_templates:
        return {name: [{"role": "user", "content": text}] for name, text in REQUESTS.items()}
    source = Path(example.__file__).read_text(encoding="utf-8")
    ids = tokenizer.encode(source)
    file, again = ids[: len(ids) // 2][:320], ids[:60]
    renamed = tokenizer.encode(FUNCTION.replace("total", "amount")[:80])
    return {
        "repeat": [*file, *again],
        "rename": [*tokenizer.encode(FUNCTION + "\n\n"), *renamed],
        "prose": PROSE,
        "code": "import os\n\n\ndef count_lines(folder):\n",
    }


def run(
    lm: mpjax.LanguageModel,
    proposers: Sequence[str],
    temperature: float,
    new_tokens: int,
    rounds: int = ROUNDS,
    *,
    steps: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The result rows of a model. steps: of an Engine's programs; None for `generate`."""
    measured = _measure if steps is None else functools.partial(_measure_engine, steps)
    parsed = {text: parse(text) for text in proposers}
    for case, prompt in prompts(lm).items():
        options = {"max_new_tokens": new_tokens}
        if temperature:
            options["sampling"] = {"temperature": temperature}  # type: ignore[assignment]
        plain, speed = measured(lm, prompt, options, rounds)
        for text, proposer in parsed.items():
            found, faster = measured(lm, prompt, options | {"speculate": proposer}, rounds)
            report = found.speculation
            assert report is not None
            yield {
                "model": Path(lm.source).name,
                "precision": lm.precision,
                "case": case,
                "repeats": case in REPEATING,
                "temperature": temperature,
                "proposer": text,
                "engine_steps": steps,
                "plain_tokens_per_second": speed,
                "tokens_per_second": faster,
                "speed_up": faster / speed if faster and speed else None,
                "acceptance": report.acceptance,
                "proposed_per_step": sum(report.proposed) / max(1, sum(report.steps)),
                "tokens_per_step": report.tokens_per_step,
                "new_tokens": len(found.tokens[0]),
                "same_tokens": found.tokens == plain.tokens,
            }


def _measure(
    lm: mpjax.LanguageModel, prompt: Any, options: dict[str, Any], rounds: int
) -> tuple[mpjax.Generation, float | None]:
    """A generation, and the median tokens/s of the repetitions after the first, which compiles."""
    found = [mpjax.generate(lm, [prompt], **options) for _ in range(rounds + 1)]
    return found[-1], _speed(found[1:])


def _speed(generations: Sequence[mpjax.Generation]) -> float | None:
    speeds = [each.tokens_per_second for each in generations]
    return statistics.median(speeds) if speeds else None


def _measure_engine(
    steps: int, lm: mpjax.LanguageModel, prompt: Any, options: dict[str, Any], rounds: int
) -> tuple[mpjax.Generation, float | None]:
    """As `_measure`, with an Engine of one slot."""
    most = MOST + options["max_new_tokens"]
    speculate = options.get("speculate")
    options = {name: value for name, value in options.items() if name != "speculate"}
    with mpjax.Engine(lm, slots=1, max_tokens=most, steps=steps, speculate=speculate) as engine:
        found = [engine.generate([prompt], **options) for _ in range(rounds + 1)]
    return found[-1], _speed(found[1:])


def main(arguments: Sequence[str]) -> int:
    """Measures, prints a line for each row, and writes all rows to the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="by default the bundled one")
    parser.add_argument("--precision")
    parser.add_argument("--speculate", action="append", help="may be given several times")
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="after one that compiles")
    parser.add_argument("--engine", type=int, metavar="N", help="steps of an Engine's programs")
    chosen = parser.parse_args(arguments)
    proposers = chosen.speculate or PROPOSERS
    heads: dict[str, Any] = {}
    for text in proposers:
        heads |= head_options(text)
    folder = chosen.model or mpjax.bundled_model()
    lm = mpjax.load(folder, precision=chosen.precision, **heads)
    rows = []
    for temperature in chosen.temperature or (0.0, 0.8):
        numbers = temperature, chosen.new_tokens, chosen.rounds
        for row in run(lm, proposers, *numbers, steps=chosen.engine):
            rows.append(row)
            print(json.dumps(row), flush=True)
            text = json.dumps(measure.stamp() | {"results": rows}, indent=1)
            chosen.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

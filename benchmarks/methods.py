"""Perplexity of each method of quantisation, on text that calibration has not seen.

python -m benchmarks.methods             the bundled model, on Python source
python -m benchmarks.methods FOLDER      another model, on English: the help topics of Python
python -m benchmarks.methods FOLDER --precisions WNF3A16KV16,W4g64A16KV16
python -m benchmarks.methods FOLDER --precisions W8A8KV16 --add

With --precisions, rows are printed, and nothing is written; with --add, they take the place of the
rows of these precisions in the file of results, so that it can be made in several runs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpjax
from mpjax.bench import measure, tables
from mpjax.checkpoint import huggingface
from mpjax.evaluation.perplexity import read_held_out
from mpjax.models import DecoderConfig, LayerSpec

RESULTS = Path(__file__).parent / "results"
# Modules of the standard library in the bundled model's training set, not in the held-out text.
MODULES = ("argparse", "textwrap", "logging", "difflib", "http.client", "unittest.case")
CASES = {
    "W16A16KV16H8": ("rtn",),  # only the embedding and the head
    "W16A16KV16H4g64": ("rtn",),
    "W4A16KV16": ("rtn", "range", "awq", "gptq", "awq+gptq"),
    "W4g64A16KV16": (
        "rtn",
        "gptq",
        "gptq-fresh",
        "rotate+gptq",
        "awq+gptq",
        "awq+gptq+learn_scales",
    ),
    "W4A8KV16": (
        *("rtn", "gptq", "os+gptq", "awq+os+gptq", "rotate+gptq", "rotate+os+gptq"),
        "rotate+hadamard+os+gptq",
    ),
    "W8A8KV16": ("rtn", "os+rtn", "rotate+rtn"),
    "WNF4A16KV16": ("rtn", "range", "gptq", "awq+gptq"),
    "WNF3A16KV16": (
        *("rtn", "range", "gptq", "gptq-fresh", "awq+gptq", "awq+gptq+learn"),
        *("rtn+learn_scales", "awq+gptq+learn_scales", "awq+gptq-fresh+learn_scales"),
    ),
}
CALIBRATION = mpjax.Calibration(window=512, tokens=48 * 512, batch=8)
LEARNED = "+learn_scales"  # suffix of a method: the whole model's scales are learned afterwards
HELD_OUT_CHARACTERS = 20_000
COLUMNS: tables.Columns = {
    "precision": "{precision}",
    "method": "{method}",
    "perplexity": "{perplexity:.3f}",
    "Δ": lambda row: f"{row['rise']:+.2%}" if row["method"] else "",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures a model and writes the results."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("folder", nargs="?", help="of a 16-bit checkpoint")
    parser.add_argument("--precisions", help="of the rows, with commas")
    parser.add_argument("--add", action="store_true", help="keep the file's other rows")
    given = parser.parse_args(arguments)
    folder = given.folder
    text, held_out = python_source() if folder is None else english()
    source = mpjax.bundled_model() if folder is None else Path(folder)
    cases = possible(CASES, source)
    if given.precisions:
        cases = {name: cases[name] for name in given.precisions.split(",")}
    rows = []
    for row in run(source, text, held_out, cases):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if given.precisions and not given.add:
        return
    name = "methods" if folder is None else f"methods-{source.name.lower()}"
    if given.add:
        rows = joined(RESULTS / f"{name}.json", rows)
    print(measure.save(name, {"model": source.name, "results": rows}, RESULTS))


def joined(file: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows merged with the file's rows of other precisions, in the order of CASES."""
    new = {row["precision"] for row in rows}
    kept = json.loads(file.read_text())["results"] if file.exists() else []
    order = ["", *CASES]
    return sorted(
        [*rows, *(row for row in kept if row["precision"] not in new)],
        key=lambda row: order.index(row["precision"] if row["method"] else ""),
    )


def possible(cases: Mapping[str, Sequence[str]], source: Path) -> dict[str, Sequence[str]]:
    """The cases whose group size divides the input channels of a model's linear maps."""
    _, config = huggingface.decoder_config(source, huggingface.read_config(source))
    channels = {shape[0] for layer in config.layers for shape in _shapes(layer, config)}
    return {
        text: methods
        for text, methods in cases.items()
        for weights in [mpjax.Precision.parse(text).weights]
        if weights is None or all(map(weights.can_split, channels))
    }


def _shapes(layer: LayerSpec, config: DecoderConfig) -> Iterator[tuple[int, int]]:
    for spec in (layer.attention, layer.mlp):
        for maps in () if spec is None else spec.linear_maps(config):
            yield from maps.shapes


def run(
    source: Path,
    text: Sequence[str],
    held_out: Sequence[str],
    cases: Mapping[str, Sequence[str]],
    calibration: mpjax.Calibration = CALIBRATION,
) -> Iterator[dict[str, Any]]:
    """A row for the 16-bit model, and one for each precision and method."""
    base = mpjax.load(source, precision="A16KV16", progress=False)
    plain = _perplexity(base, held_out, calibration)
    yield {"precision": base.precision, "method": "", "perplexity": plain, "rise": 0.0}
    for precision, methods in cases.items():
        for method in methods:
            recipe = mpjax.Recipe.of(precision, method.removesuffix(LEARNED))
            documents = text if recipe.needs_text else None
            lm = mpjax.quantize(base, recipe, documents, calibration=calibration, progress=False)
            if method.endswith(LEARNED):
                lm = mpjax.learn_scales(
                    lm, text, reference=base, calibration=calibration, progress=False
                )
            found = _perplexity(lm, held_out, calibration)
            yield {
                "precision": precision,
                "method": method,
                "perplexity": found,
                "rise": found / plain - 1,
            }


def python_source() -> tuple[list[str], list[str]]:
    """Calibration text and held-out text for the bundled model."""
    text = [inspect.getsource(importlib.import_module(name)) for name in MODULES]
    return text, read_held_out(mpjax.bundled_model() / "held_out.jsonl")


def english() -> tuple[list[str], list[str]]:
    """Calibration and held-out text in English: every second help topic of Python, and others."""
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    return ["\n\n".join(topics[::2])], ["\n\n".join(topics[1::2])[:HELD_OUT_CHARACTERS]]


def _perplexity(
    lm: mpjax.LanguageModel, held_out: Sequence[str], calibration: mpjax.Calibration
) -> float:
    found = mpjax.evaluate(lm, held_out, window=calibration.window, progress=False)
    return found.perplexity


if __name__ == "__main__":
    main()

"""Command line: `python -m examples.train_bundled_model STAGE`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

from examples.train_bundled_model import prepare
from examples.train_bundled_model.corpus import BUNDLED
from examples.train_bundled_model.recipe import Recipe, TrainingError, sweep


def main(arguments: list[str] | None = None) -> None:
    """Run the stage that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_bundled_model",
        description="Make the small model that ships in mpjax/bundled, stage by stage.",
    )
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    stages.add_parser(
        "bundle",
        help="rewrite the held-out text and the tokeniser in mpjax/bundled; "
        "an existing checkpoint and earlier perplexities no longer fit them",
    )
    tokens = stages.add_parser(
        "prepare",
        help="write the tokenised corpus: train.bin, validation.bin, held_out.bin, corpus.json",
    )
    tokens.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="created if it is missing"
    )
    _add_train(stages)
    options = parser.parse_args(arguments)
    if options.stage == "bundle":
        prepare.bundle()
    elif options.stage == "prepare":
        print(json.dumps(prepare.prepare(options.output), indent=2))
    else:
        _train(options, parser)


def _add_train(stages: argparse._SubParsersAction) -> None:
    text = "train the model on the output of `prepare` and write it as a Hugging Face checkpoint"
    stage = stages.add_parser(
        "train",
        help=text,
        description=f"T{text[1:]}. The defaults are what the bundled model was trained "
        "with. Needs optax: install the extra `train`.",
    )
    add = stage.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="where `prepare` wrote")
    add(
        "--output",
        type=Path,
        default=BUNDLED,
        metavar="FOLDER",
        help="gets config.json, generation_config.json, model.safetensors and training.json "
        "(default: mpjax/bundled)",
    )
    meanings = {
        "steps": "optimiser steps",
        "learning_rate": "the highest, after warming up",
        "weight_decay": "AdamW's, of matrices",
        "noise": "share of input tokens replaced by random ones, from 0 to 1",
        "batch": "windows of text in a step",
        "context": "tokens in a window, and the longest text that the model can read",
        "warmup": "steps until the highest learning rate",
        "interval": "steps between lines of the log",
        "compute_dtype": "bfloat16 or float32, of the forward and backward pass; on a GPU, "
        "bfloat16 takes cuDNN's attention and float32 takes XLA's",
        "seed": "of the initial weights, the order of the text, and the noise",
    }
    for name, meaning in meanings.items():
        default = getattr(Recipe, name)
        add(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar=type(default).__name__.upper().replace("STR", "DTYPE"),
            help=f"{meaning} (default: {default})",
        )
    add(
        "--sweep",
        action="store_true",
        help="train with five recipes around these values; write the best by validation loss",
    )
    add(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="a sweep begins no further recipe after this time",
    )


def _train(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    try:
        from examples.train_bundled_model import train
    except ModuleNotFoundError as missing:
        if missing.name != "optax":
            raise
        parser.exit(1, "error: training needs optax: pip install optax\n")
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe)}
    try:
        base = Recipe(**values)
        recipes = sweep(base) if options.sweep else [base]
        train.run(options.data, options.output, recipes, time_limit=options.time_limit)
    except TrainingError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()

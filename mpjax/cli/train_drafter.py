"""`mpjax train-drafter`: trains an EAGLE-3 head for a model on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mpjax.cli import options

NAME = "train-drafter"
EPILOG = """\b
Examples:
  mpjax train-drafter Qwen3-8B Qwen3-8B-eagle3 --text book.txt --steps 20000
  mpjax chat --model Qwen3-8B --speculate eagle:3:Qwen3-8B-eagle3

The head proposes tokens that the model verifies. It reads hidden states of three of the model's
layers, and has the sizes of one layer. Train it on texts that the model has written, or like those
that it will write: acceptance depends on them, and results don't. Needs optax.
"""


def command(
    source: Annotated[str, typer.Argument(help=options.SOURCE_HELP.split(" By default")[0])],
    target: Annotated[Path, typer.Argument(help="Folder to write the head to.", file_okay=False)],
    text: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='A file with one document, or a .jsonl file with {"text": ...} on each line.',
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Steps of gradient descent.")] = 600,
    batch: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens in a row.")] = 256,
    rate: Annotated[float, typer.Option(help="The learning rate.")] = 2e-3,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many tokens the head can propose, the most frequent ones of the text.",
            show_default="all",
        ),
    ] = None,
    precision: options.PrecisionText = None,
    dtype: options.ComputeDtype = None,
) -> None:
    """Train an EAGLE-3 head for a model on a text."""
    import mpjax
    from mpjax.checkpoint.drafter import require_empty

    with options.wrong_usage():
        training = mpjax.DrafterTraining(steps, batch, length, rate, vocabulary=vocabulary)
        require_empty(target)
    documents = options.read_documents(text)
    chosen = None if precision is None else options.parse_precision(precision)
    lm = options.load(source, chosen, dtype)
    losses = mpjax.train_drafter(lm, documents, target, training)
    typer.echo(f"{target}: {steps} steps, loss {losses[0]:.3f} to {losses[-1]:.3f} nats")

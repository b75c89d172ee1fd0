"""`mpjax quantize`: quantises a 16-bit checkpoint with statistics of a text, and saves it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpjax.cli import options
from mpjax.disk import size

if TYPE_CHECKING:
    from mpjax.quantization.recipe import Recipe

NAME = "quantize"
EPILOG = """\b
Examples:
  mpjax quantize Qwen3-8B W4 --precision W4A16KV8 --text book.txt
  mpjax quantize Qwen3-8B W8 --precision W8A8KV8 --method os --text book.txt
  mpjax quantize Qwen3-8B mixed --recipe recipe.toml --text book.txt

\b
Methods are steps joined by +. First, for all of the model, or not at all:
  rotate  QuaRot: rotates the residual stream and values, so that no channel
          is much larger than others; needs no text
Then any of those that scale channels:
  awq     weights that meet large inputs get finer steps
  smooth  SmoothQuant: activations of 8 bits get smaller, weights larger
  os      Outlier Suppression+: the same, for channels beyond a threshold
Then one that rounds:
  rtn     to nearest, as `mpjax convert` does; needs no text
  range   to nearest, in the ranges of groups that cost least
  clip    the same, with ranges found by descent (pip install "mpjax[train]")
  gptq    row by row; later rows make up for the errors of earlier ones

\b
A recipe is a TOML file; of its rules the first that matches counts:
  precision = "W4A16KV8"
  method = "awq+gptq"
  [[rules]]
  modules = "layers.*.mlp.down"
  precision = "W8A16KV8"

One layer at a time is read and quantised, so that the 16-bit model needs no room on the device. An
interrupted run goes on with the layer where it was, when the same command is given again.
"""


def command(
    source: Annotated[str, typer.Argument(help=options.SOURCE_HELP.split(" By default")[0])],
    target: Annotated[Path, typer.Argument(help="Folder to write.", file_okay=False)],
    precision: options.PrecisionText = None,
    method: Annotated[
        str, typer.Option(metavar="STEPS", help="How weights are rounded; see below.")
    ] = "gptq",
    recipe: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="TOML file that gives linear maps different precisions and methods, in the place "
            "of --precision and --method.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="Text like the one that the model will see: one document, or for .jsonl one per "
            'line, as {"text": ...}. All methods but rtn need it; 100,000 tokens are plenty.',
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the text that are read at most.")
    ] = 128 * 2048,
    window: Annotated[
        int, typer.Option(min=1, help="Tokens of a window; each begins with an empty context.")
    ] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Windows that are read at a time.")] = 4,
    dtype: options.ComputeDtype = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model saved there before.")
    ] = False,
) -> None:
    """Quantise a checkpoint with the statistics of a text, and save it."""
    chosen = _recipe(precision, method, recipe)
    documents = None if text is None else options.read_documents(text)
    import mpjax
    from mpjax.quantization.finished import FinishedLayers

    options.require_target(target, overwrite)
    target = target.absolute()
    work = target.with_name(f".{target.name}.layers")
    lm = mpjax.quantize(
        source,
        chosen,
        documents,
        calibration=mpjax.Calibration(window, tokens, batch),
        dtype=None if dtype is None else dtype.value,
        work=work,
    )
    mpjax.save(lm, target, overwrite=overwrite)
    FinishedLayers(work).remove()
    typer.echo(f"{target}: {lm.precision}, {size(lm.nbytes)} in device memory")
    sys.stdout.flush()


def _recipe(precision: str | None, method: str, recipe: Path | None) -> Recipe:
    """The recipe that the options say; wrong usage where they contradict each other."""
    from mpjax.quantization.recipe import Recipe

    if (recipe is None) == (precision is None):
        raise typer.BadParameter("give either --precision or --recipe", param_hint="--precision")
    if recipe is not None:
        return Recipe.read(recipe)
    assert precision is not None
    parsed = options.parse_precision(precision)
    try:
        return Recipe.of(parsed, method)
    except ValueError as error:
        hint = "--method" if parsed.weights else "--precision"
        raise typer.BadParameter(str(error), param_hint=hint) from error

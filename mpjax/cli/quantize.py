"""`mpjax quantize`: quantises a 16-bit checkpoint with calibration text, and saves it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mpjax.cli import options
from mpjax.files.disk import size

if TYPE_CHECKING:
    from mpjax.quantization.recipe import Recipe

NAME = "quantize"
MARK = "# mpjax quantize --budget"  # the first line of recipes that may be replaced
EPILOG = """\b
Examples:
  mpjax quantize Qwen3-8B W4 --precision W4A16KV8 --text book.txt
  mpjax quantize Qwen3-8B W8 --precision W8A8KV8 --method os --text book.txt
  mpjax quantize Qwen3-8B W4Ax --precision W4AxKV4 --text book.txt
  mpjax quantize Qwen3-8B mixed --recipe recipe.toml --text book.txt
  mpjax quantize Qwen3-8B small --budget 3.6 --precision A16KV8 \\
      --text book.txt

\b
Methods are steps joined by +. First, for all of the model, or not at all:
  rotate  QuaRot: rotates the residual stream and values, so that no channel
          is much larger than others; needs no text
  hadamard  QuaRot's R4: mixes what down projections read, in every step,
          for 4 and 8-bit activations; after rotate, never before it
Then any of those that scale channels:
  awq     weights that meet large inputs get finer steps
  smooth  SmoothQuant: activations of 8 bits get smaller, weights larger
  os      Outlier Suppression+: the same, for channels beyond a threshold
Then one that rounds, range if none is named (awq is awq+range):
  rtn     to nearest, as `mpjax convert` does; needs no text
  range   to nearest, in the ranges of groups that cost least
  clip    the same, with ranges found by descent (pip install optax)
  gptq    row by row; later rows make up for the errors of earlier ones
  gptq-fresh  the same, with a group's range found when its turn comes
Then, if wanted:
  learn   descent on the scales, against the outputs of the 16-bit layer

\b
--learn EPOCHS goes on when all layers are done: descent on the scales of the
whole model, against the predictions of the 16-bit one (FLUTE). It needs
optax: pip install optax.

\b
A recipe is a TOML file; of its rules the first that matches counts:
  precision = "W4A16KV8"
  method = "awq+gptq"
  [[rules]]
  modules = "layers.*.mlp.down"
  precision = "W8A16KV8"

A recipe for a budget of bits needs the whole 16-bit model on the device, to measure how much the
error of each linear map costs. Otherwise one layer at a time is read and quantised, so that the
16-bit model needs no room on the device. With --devices, each device keeps its share of the layers
that are done. An interrupted run goes on with the layer where it was,
when the same command is given again; another one is refused without --overwrite.
"""


Precision = Annotated[
    str | None,
    typer.Option(
        metavar="W4A16KV8",
        show_default=False,
        help="Formats of weights, activations and KV cache; `mpjax --help` explains them. The "
        "head gets 8 bits, a tied table, too, unless H says otherwise: W4A16KV8H16. This or "
        "--recipe is needed; with --budget, without a W part, and A16KV16 by default.",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(metavar="STEPS", show_default="gptq", help="How weights are rounded; see below."),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        show_default=False,
        help="TOML file that gives linear maps different precisions and methods, in the place "
        "of --precision and --method.",
    ),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        show_default=False,
        metavar="BITS",
        help="Bits per weight, scales included, in the place of a W part: each linear map gets "
        "the one of --choices that costs least. The recipe is kept in TARGET.toml.",
    ),
]
Choices = Annotated[str, typer.Option(metavar="W4,W8", help="Formats that --budget chooses among.")]
Text = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        show_default=False,
        help="Text like the one that the model will see: one document, or for .jsonl one per "
        'line, as {"text": ...}. All methods but rtn need it; 100,000 tokens are plenty.',
    ),
]
ActivationError = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        show_default=False,
        help="Of W4Ax: the largest squared error of each map's outputs, relative to their "
        "squares, that rounding activations may cause, in the place of a share of blocks.",
    ),
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of the text that are read at most.")]
Window = Annotated[
    int, typer.Option(min=1, help="Tokens of a window; each begins with an empty context.")
]
Learn = Annotated[
    int,
    typer.Option(
        min=0, help="Passes over the text in which the scales of the whole model are learned."
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace a model saved there before, and discard the finished layers of another "
        "command.",
    ),
]


def command(
    source: Annotated[str, typer.Argument(help=options.SOURCE_HELP.split(" By default")[0])],
    target: Annotated[Path, typer.Argument(help="Folder to write.", file_okay=False)],
    precision: Precision = None,
    method: Method = None,
    recipe: RecipeOption = None,
    budget: BudgetOption = None,
    choices: Choices = "WNF2,WNF3,W4,W8",
    text: Text = None,
    activation_error: ActivationError = None,
    tokens: Tokens = 128 * 2048,
    window: Window = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Windows that are read at a time.")] = 4,
    learn: Learn = 0,
    dtype: options.ComputeDtype = None,
    devices: options.DeviceCount = 1,
    overwrite: Overwrite = False,
) -> None:
    """Quantise a checkpoint with statistics of a text, and save it."""
    if budget is not None:
        _require_budget(precision, recipe, text, activation_error)
    chosen = None if budget is not None else _recipe(precision, method, recipe)
    if activation_error is not None and chosen is not None:
        with options.wrong_usage("--activation-error"):
            chosen = chosen.with_activation_error(activation_error)
    documents = None if text is None else _read_text(text)
    import mpjax

    options.require_target(target, overwrite)
    if learn:
        _require_learning(documents, devices)
    target = target.absolute()
    if chosen is None:
        asked = Budget(budget or 0.0, tuple(choices.split(",")), precision or "A16KV16", method)
        chosen = _fit(source, target, asked, documents or [], dtype)
    # A budget and learning use the text too.
    is_read = chosen.needs_text or not (learn or budget is not None)
    work = target.with_name(f".{target.name}.layers")
    calibration = mpjax.Calibration(window, tokens, batch)
    with _telling_of_layers(work):
        lm = mpjax.quantize(
            source,
            chosen,
            documents if is_read else None,
            calibration=calibration,
            dtype=None if dtype is None else dtype.value,
            work=work,
            overwrite=overwrite,
            devices=devices,
        )
        if learn:
            how: dict[str, Any] = {"reference": source, "calibration": calibration}
            lm = mpjax.learn_scales(
                lm, documents or [], learning=mpjax.Learning(epochs=learn), **how
            )
        mpjax.save(lm, target, overwrite=overwrite)
    if budget is None:
        _remove_old_recipe(target, recipe)
    typer.echo(f"{target}: {lm.precision}, {size(lm.nbytes)} in device memory")
    sys.stdout.flush()


def _read_text(path: Path) -> list[str]:
    """The documents of a file. Raises ValueError, which names the file, if it has no text."""
    documents = options.read_documents(path)
    if not any(document.strip() for document in documents):
        raise ValueError(f"{path} has no text: expected one like those that the model will see")
    return documents


@contextlib.contextmanager
def _telling_of_layers(work: Path) -> Iterator[None]:
    """Removes the finished layers after a complete run; reports how many an interrupted run kept.

    work: the folder of the finished layers.
    """
    from mpjax.quantization.finished import FinishedLayers

    try:
        yield
    except ValueError:  # the same command would fail again, so no note
        raise
    except BaseException:
        if count := FinishedLayers(work).count:
            layers = f"{count} finished layer{'s' * (count > 1)}"
            typer.echo(f"mpjax: {work} keeps {layers}: the same command goes on there", err=True)
        raise
    FinishedLayers(work).remove()


class Budget(NamedTuple):
    """The budget in bits per weight, and the formats to choose from."""

    bits: float
    choices: tuple[str, ...]
    precision: str
    method: str | None


def _require_budget(
    precision: str | None, recipe: Path | None, text: Path | None, activation_error: float | None
) -> None:
    """Raises BadParameter for --budget with a recipe, W part or error, or without text."""
    if activation_error is not None:
        raise typer.BadParameter(
            "give either --budget or --activation-error", param_hint="--activation-error"
        )
    if recipe is not None:
        raise typer.BadParameter("give either --budget or --recipe", param_hint="--budget")
    if precision is not None and options.parse_precision(precision).formats:
        message = f"{precision} has a W part, which the budget decides about: give KV alone, A16KV8"
        raise typer.BadParameter(message, param_hint="--precision")
    if text is None:
        raise typer.BadParameter("--budget needs --text to measure on", param_hint="--text")


def _fit(
    source: str, target: Path, asked: Budget, documents: list[str], dtype: options.Dtype | None
) -> Recipe:
    """Finds the recipe for a budget, and writes it beside the target."""
    from mpjax.files.atomic_write import atomic_write, require_writable
    from mpjax.quantization.budget import recipe_for_budget
    from mpjax.quantization.recipe import DEFAULT_METHOD

    path = _kept_recipe(target)
    require_writable(path)
    if path.exists() and not _is_of_budget(path):
        raise ValueError(f"{path} is in the place of the recipe: move it, or choose another target")
    lm = options.load(source, None, dtype)
    found = recipe_for_budget(
        lm,
        asked.bits,
        documents,
        choices=[choice.strip() for choice in asked.choices],
        precision=asked.precision,
        method=DEFAULT_METHOD if asked.method is None else asked.method,
    )
    atomic_write(path, f"{MARK} {asked.bits:g}\n{found.recipe.to_toml()}")
    typer.echo(
        f"{path}: {found.bits:.2f} bits per weight, {found.nats:.4f} nats per token expected if "
        "rounded to nearest"
    )
    return found.recipe


def _kept_recipe(target: Path) -> Path:
    """The path to which the recipe of a budget is written."""
    return target.with_name(f"{target.name}.toml")


def _is_of_budget(path: Path) -> bool:
    """Whether a recipe was written by --budget, so that it may be replaced."""
    return path.read_bytes().startswith(MARK.encode())


def _remove_old_recipe(target: Path, used: Path | None) -> None:
    """Deletes the budget recipe of the replaced model, unless this run used it."""
    path = _kept_recipe(target)
    is_used = used is not None and used.resolve() == path.resolve()
    if path.is_file() and not is_used and _is_of_budget(path):
        path.unlink()


def _require_learning(documents: list[str] | None, devices: int) -> None:
    """Raises an error, before layers are quantised, if the requirements of --learn are not met."""
    from mpjax.quantization.clipping import require_optax

    require_optax("learn")
    if devices > 1:
        raise typer.BadParameter(
            "the scales of the whole model are learned on one device: leave --devices out, and "
            "load the saved model onto several",
            param_hint="--learn",
        )
    if documents is None:
        raise typer.BadParameter("learning needs --text", param_hint="--learn")


def _recipe(precision: str | None, method: str | None, recipe: Path | None) -> Recipe:
    """The recipe of the options. Raises BadParameter if they contradict each other."""
    from mpjax.quantization.recipe import DEFAULT_METHOD, Recipe

    if recipe is not None and precision is not None:
        message = "give either --precision or --recipe, not both"
        raise typer.BadParameter(message, param_hint="--precision")
    if recipe is not None and method is not None:
        message = "give either --method or --recipe, not both: a recipe has a method of its own"
        raise typer.BadParameter(message, param_hint="--method")
    if recipe is None and precision is None:
        message = "neither --precision, such as W4A16KV8, nor --recipe nor --budget is given"
        raise typer.BadParameter(message, param_hint="--precision")
    if recipe is not None:
        return Recipe.read(recipe)
    assert precision is not None
    parsed = options.parse_precision(precision)
    try:
        return Recipe.of(parsed, DEFAULT_METHOD if method is None else method)
    except ValueError as error:
        hint = "--method" if parsed.weights else "--precision"
        raise typer.BadParameter(str(error), param_hint=hint) from error

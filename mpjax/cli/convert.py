"""`mpjax convert`: quantises and packs a checkpoint once, and saves the packed model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpjax.cli import options
from mpjax.files.disk import size

if TYPE_CHECKING:
    from mpjax.precision import Precision

NAME = "convert"
EPILOG = """\b
Examples:
  mpjax convert Qwen3-8B Qwen3-8B-W4 --precision W4A16KV8
  mpjax convert Qwen/Qwen3-8B-AWQ Qwen3-8B-AWQ-packed
  mpjax convert Qwen3-8B Qwen3-8B-W8 --precision W8A8KV8s --calibrate book.txt

Load the target folder like any other checkpoint: its weights are restored bit for bit, without
quantising or packing again. The KV format in the precision becomes the model's default. --calibrate
measures the cache scales that KV8s needs and KVfp8 can use, and saves them with the model.
"""


def command(
    source: Annotated[str, typer.Argument(help=options.SOURCE_HELP.split(" By default")[0])],
    target: Annotated[Path, typer.Argument(help="Folder to write the model to.", file_okay=False)],
    precision: options.PrecisionText = None,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="Text on which to measure the cache scales that KV8s needs and KVfp8 can use: a "
            'file with one document, or a .jsonl file with {"text": ...} on each line.',
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a saved model in the target folder.")
    ] = False,
) -> None:
    """Quantise and pack a checkpoint once, and save the result."""
    import mpjax

    options.require_target(target, overwrite)
    chosen = None if precision is None else options.parse_precision(precision)
    _check_scales(source, chosen, calibrate)
    documents = None if calibrate is None else options.read_documents(calibrate)
    lm = options.load(source, chosen, dtype, max_positions, devices)
    if documents is not None:
        from mpjax.quantization.calibration import calibrate_cache

        lm = calibrate_cache(lm, documents)

    before = _weight_bytes(lm.source)  # before saving, because the source may be the target
    mpjax.save(lm, target, overwrite=overwrite)
    typer.echo(f"{lm.source}: {size(before)} of weights")
    typer.echo(
        f"{target}: {size(_weight_bytes(target))} of weights, {lm.precision}, "
        f"{size(lm.nbytes)} in device memory"
    )
    sys.stdout.flush()


def _check_scales(source: str, chosen: Precision | None, calibrate: Path | None) -> None:
    """Raises BadParameter for options that `calibrate_cache` or `save` would refuse.

    Those functions would raise only after the model has been loaded.
    """
    from mpjax.checkpoint.description import is_saved

    was_saved = is_saved(Path(source))
    if was_saved and chosen is None:
        return  # a saved model has a KV format of its own
    scaling = None if chosen is None else chosen.kv.scaling
    if calibrate is not None and scaling is None:
        raise typer.BadParameter(
            f"the cache of {chosen or 'KV16'} has no scales to measure: choose KV8s or KVfp8",
            param_hint="--calibrate",
        )
    if calibrate is None and scaling == "static" and not was_saved:  # a saved model may have scales
        raise typer.BadParameter(
            f"the cache of {chosen} needs scales: name a text to measure them on",
            param_hint="--calibrate",
        )


def _weight_bytes(folder: Path) -> int:
    """The bytes of the safetensors files in a checkpoint's folder, or of a GGUF file."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file())

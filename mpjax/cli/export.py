"""`mpjax export`: writes a model as a Hugging Face checkpoint, which other servers load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mpjax.cli import options
from mpjax.files.disk import size

NAME = "export"
EPILOG = """\b
Formats:
  awq              4 bits in groups: vLLM, SGLang, LMDeploy, transformers
  gptq, gptq_v2    4 and 8 bits, act-order, mixtures: vLLM, transformers
  pack-quantized   4 and 8 bits (compressed-tensors): vLLM, transformers
  int-quantized    W8A8 (compressed-tensors): vLLM, transformers
  float-quantized  FP8 (compressed-tensors): vLLM, transformers
  fp8              FP8 in blocks of 128: vLLM, SGLang, transformers
  mxfp4            gpt-oss as published: vLLM, SGLang, transformers
  plain            nothing packed, from any model: everything

\b
Examples:
  mpjax export Qwen3-8B-W4 Qwen3-8B-W4-AWQ --format awq
  mpjax export Qwen3-8B Qwen3-8B-FP8 --precision WFP8AFP8KV16
  mpjax export Qwen3-8B-GPTQ Qwen3-8B-16bit --format plain

Codes, scales and zero points of linear maps are written as they are, so that nothing is lost; only
`plain` computes the weights, and a line says so where it loses a rounding of activations. A head in
8 bits (H8) stays packed where the format can hold it; a packed head or embedding is otherwise
written in the model's dtype, mostly 16 bits, and a line says so. A format that can't hold the
linear maps is refused. --precision quantises a 16-bit checkpoint first, rounding to nearest.
"""


def command(
    source: Annotated[str, typer.Argument(help=options.SOURCE_HELP.split(" By default")[0])],
    target: Annotated[Path, typer.Argument(help="Folder to write.", file_okay=False)],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            show_default=False,
            help="How weights are written, as below. By default what most servers take: "
            "pack-quantized for symmetric integers, awq or gptq_v2 for others, int-quantized for "
            "W8A8, float-quantized for FP8, mxfp4 for gpt-oss, plain for 16 bits.",
        ),
    ] = None,
    plain_head: Annotated[
        bool,
        typer.Option(
            "--plain-head",
            help="Write a packed head (H8) in the model's dtype, for readers of one format only.",
        ),
    ] = False,
    precision: options.PrecisionText = None,
    dtype: options.ComputeDtype = None,
    devices: options.DeviceCount = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model exported there before.")
    ] = False,
) -> None:
    """Write a model as a checkpoint that vLLM and transformers load."""
    import mpjax
    from mpjax.checkpoint import exporting, staging
    from mpjax.checkpoint.export_plan import PLAIN, require_layout
    from mpjax.kernels import ActivationFormat
    from mpjax.language_model import weight_formats

    staging.clean_up(target)  # restores a folder that a killed export has moved away
    try:
        require_layout(format)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--format") from error
    # `export` raises this as well, but only after the model has been loaded.
    exporting.require_replaceable(target, overwrite)
    lm = options.load(source, precision, dtype, devices=devices)
    dequantized = mpjax.export(
        lm, target, format=format, plain_head=plain_head, overwrite=overwrite
    )
    written = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    weights = lm.precision.removesuffix(str(lm.kv_format))
    typer.echo(f"{target}: {size(written)} of weights from {lm.source} ({weights})")
    for name in dequantized:
        why = "" if plain_head else ", because the format has no place for it"
        typer.echo(f"{name} is dequantised to {lm.config.dtype}{why}")
    formats = map(ActivationFormat.of, weight_formats(lm.model))
    if format == PLAIN and any(activations.values for activations in formats):
        typer.echo(f"activations are no longer rounded, as {weights} says: {PLAIN} can't tell it")
    sys.stdout.flush()

"""`mpjax evaluate`: measures the perplexity of a model in several precisions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import typer

from mpjax.bench import tables
from mpjax.cli import options
from mpjax.cli.output import print_json, to_json, write

if TYPE_CHECKING:
    from mpjax.evaluation import Evaluation
    from mpjax.language_model import LanguageModel
    from mpjax.precision import Precision

NAME = "evaluate"
WEIGHT_PRECISIONS = (
    *("W16A16KV16", "W8A16KV16", "W4A16KV16", "W4g32A16KV16", "WNF4A16KV16", "WNF3A16KV16"),
    *("WFP8A16KV16", "WFP8AFP8KV16", "W8A8KV16", "W4A8KV16"),
)
BOTH_PRECISIONS = (
    *("W16A16KV8", "W16A16KV4", "W16A16KV4t", "W16A16KV4c", "W16A16KV4cg32", "W16A16K4cV4c"),
    *("W16A16KV2", "W16A16KV2g32", "W16A16KV2t", "W4A16KV8", "W4A16KV4"),
)
CACHE_PRECISIONS = ("A16KV16", "A16KV8", "A16KV4")
HEADERS = ("precision", "perplexity", "Δ", "bits per byte", "weights")
EPILOG = """\b
Examples:
  mpjax evaluate
  mpjax evaluate --precision W16A16KV16 --precision W4A16KV8
  mpjax evaluate --format markdown --output results.json
  mpjax evaluate --precision A16KV8 --json | python -m json.tool
  mpjax evaluate Qwen3-8B-AWQ --text wikitext.txt --window 2048

\b
The model reads the text through its KV cache, as in decoding, so that the
rounding of the cache counts as well as that of the weights. Δ is the change
of the perplexity from the first precision. The default text is a part of
Python's standard library on which the bundled model was not trained.
Perplexities are comparable only for the same text and window.

\b
--json and --output give one JSON object with model, text, documents, bytes,
calibration, batch, device, versions and rows; each row has precision,
perplexity, nats_per_token, bits_per_byte, tokens, window and weights_bytes.
A number that is not finite, as after an overflow, is null.
"""


class Format(enum.StrEnum):
    """The format of printed results."""

    table = "table"
    markdown = "markdown"
    json = "json"


def command(
    source: options.Source = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="Text to measure on: a file with one document, or a .jsonl file with "
            '{"text": ...} on each line. By default the held-out text that comes with mpjax.',
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W4A16KV8",
            show_default=False,
            help="Precision to measure, as `mpjax --help` explains; may be given several times. By "
            "default every weight format and KV format; for a quantised checkpoint KV16, KV8 and "
            "KV4.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="The most tokens that a prediction depends on. By default 1024, or the model's "
            "positions if it has fewer.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of windows to read together.")] = 8,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="Text on which to measure the cache scales that KV8s needs and KVfp8 can use. "
            "They replace the checkpoint's scales.",
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="Format of the printed results.")] = Format.table,
    json: Annotated[
        bool, typer.Option("--json", help="Print results as JSON, like --format json.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the results to a JSON file.")
    ] = None,
) -> None:
    """Measure the perplexity of a model in several precisions."""
    import mpjax
    from mpjax.atomic_write import atomic_write, require_writable
    from mpjax.evaluation import evaluate
    from mpjax.loading import find_folder

    if json and format is Format.markdown:
        raise typer.BadParameter("results are printed in one format", param_hint="--json")
    if output is not None:
        require_writable(output)
    folder = find_folder(mpjax.bundled_model() if source is None else source)
    chosen = [options.parse_precision(name) for name in precision or _defaults(folder)]
    if text is None:
        text = mpjax.bundled_model() / "held_out.jsonl"
    samples = None if calibrate is None else options.read_documents(calibrate)
    if samples is not None and not any(one.kv.scaling for one in chosen):
        raise typer.BadParameter(
            "no precision has a cache with scales to measure: choose KV8s or KVfp8",
            param_hint="--calibrate",
        )
    documents = options.read_documents(text)
    rows = _measure(
        chosen,
        lambda precision: options.load(str(folder), precision, dtype, max_positions, devices),
        lambda lm: evaluate(lm, documents, window=window, batch=batch),
        samples,
    )
    result = _result(folder, text, documents, calibrate, batch, rows)
    if output is not None:
        atomic_write(output, to_json(result, indent=1) + "\n")
    if json or format is Format.json:
        print_json(result)
    elif format is Format.markdown:
        write(markdown(rows) + "\n")
    else:
        tables.show(None, HEADERS, _cells(rows))


def _defaults(folder: Path) -> tuple[str, ...]:
    """The precisions to measure by default.

    For a quantised checkpoint these are KV formats alone, because only 16-bit weights can be
    quantised.
    """
    from mpjax.checkpoint import huggingface
    from mpjax.checkpoint.description import is_saved

    if is_saved(folder) or huggingface.read_config(folder).get("quantization_config") is not None:
        return CACHE_PRECISIONS
    return WEIGHT_PRECISIONS + BOTH_PRECISIONS


def _measure(
    precisions: list[Precision],
    load: Callable[[Precision], LanguageModel],
    score: Callable[[LanguageModel], Evaluation],
    samples: list[str] | None,
) -> list[dict[str, Any]]:
    """Measures a row for each precision; each precision of weights is loaded once.

    samples: texts on which caches with given scales are calibrated, or None.
    """
    from mpjax.calibration import calibrate_cache

    console = rich.console.Console(stderr=True)
    rows: dict[int, dict[str, Any]] = {}
    for weights in dict.fromkeys(precision.of_weights for precision in precisions):
        lm = None
        for index, precision in enumerate(precisions):
            if precision.of_weights != weights:
                continue
            if console.is_terminal:
                # `evaluate` has a progress bar of its own, which does not move while it compiles.
                console.print(f"{precision}, compiling first", highlight=False)
            if lm is None:
                lm = load(precision)
            lm = dataclasses.replace(lm, kv_format=precision.kv)
            if samples is not None and precision.kv.scaling is not None:
                lm = calibrate_cache(lm, samples)
            found = score(lm)
            rows[index] = {
                "precision": lm.precision,
                **dataclasses.asdict(found),
                "weights_bytes": lm.nbytes,
            }
    return [rows[index] for index in sorted(rows)]


def _result(
    folder: Path,
    text: Path,
    documents: list[str],
    calibration: Path | None,
    batch: int,
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """The JSON object of --output and --json: the rows, and everything that they depend on."""
    import jax

    import mpjax
    from mpjax.kernels.device import default_device

    device = default_device()
    return {
        "model": folder.name,
        "text": text.name,
        "documents": len(documents),
        "bytes": sum(len(document.encode()) for document in documents),
        "calibration": None if calibration is None else str(calibration),
        "batch": batch,
        "device": f"{device.platform}: {device.device_kind}",
        "versions": {"mpjax": mpjax.__version__, "jax": jax.__version__},
        "rows": rows,
    }


def _cells(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    base = rows[0]["perplexity"]
    return [
        (
            row["precision"],
            f"{row['perplexity']:.4f}",
            f"{100 * (row['perplexity'] / base - 1):+.2f} %" if index else "",
            f"{row['bits_per_byte']:.4f}",
            f"{row['weights_bytes'] / 1e6:,.2f} MB",
        )
        for index, row in enumerate(rows)
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows of a result as a Markdown table."""
    table = [HEADERS, ("---", *["---:"] * (len(HEADERS) - 1)), *_cells(rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in table)

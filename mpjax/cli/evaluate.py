"""`mpjax evaluate`: measures perplexity in several precisions, and divergence from 16 bits."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.bench import tables
from mpjax.cli import options
from mpjax.cli.output import print_json, to_json, write

if TYPE_CHECKING:
    from mpjax.evaluation.perplexity import Evaluation
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
COLUMNS: tables.Columns = {
    "precision": "{precision}",
    "perplexity": "{perplexity:.4f}",
    "Δ": "{rise:+.2f} %",
    "bits per byte": "{bits_per_byte:.4f}",
    "weights": tables.scaled("{:,.2f} MB", "weights_bytes", 1e-6),
}
COLUMNS_OF_COMPARISONS: tables.Columns = {
    "precision": "{precision}",
    "bits": "{bits_per_weight:.2f}",
    "perplexity": "{perplexity:.4f}",
    "Δ": "{rise:+.2f} %",
    "KL in nats": "{kl_mean:.5f} ± {kl_error:.5f}",
    "median": "{kl_median:.5f}",
    "99 %": "{kl_p99:.4f}",
    "same top": tables.scaled("{:.2f} %", "same_top", 100),
    "weights": tables.scaled("{:,.2f} MB", "weights_bytes", 1e-6),
}
EPILOG = """\b
Examples:
  mpjax evaluate
  mpjax evaluate --precision W16A16KV16 --precision W4A16KV8
  mpjax evaluate --format markdown --output results.json
  mpjax evaluate --precision A16KV8 --json | python -m json.tool
  mpjax evaluate Qwen3-8B-AWQ --text wikitext.txt --window 2048 --stride 2048
  mpjax evaluate Qwen3-8B-W4 --against Qwen3-8B --text book.txt --window 2048
  mpjax evaluate Qwen3-8B --against itself --precisions W8A8,W4A8 --plot b.svg

\b
The model reads the text through its KV cache, as in decoding, so that the
rounding of the cache counts as well as that of the weights. Δ is the change
of the perplexity from the first precision. The default text is a part of
Python's standard library on which the bundled model was not trained.
Perplexities are comparable only for the same text, window and stride.
All precisions are checked before the first is measured, and each row is
printed as it comes, and written with those before it to the --output.
Precisions with the same weights follow each other.
--window 2048 --stride 2048 measures as papers on quantisation do.

\b
--against compares the predictions at each position with those of another
model, usually the 16-bit one: mean, median and 99th percentile of the KL
divergence, and how often both have the same most likely token. These tell
models apart that perplexity does not. The text is then cut as with --stride,
which is the window by default; Δ is the change from the reference.

\b
--json and --output give one JSON object with model, reference, text,
documents, bytes, calibration, batch, device, versions, command and rows; a
row has precision, perplexity, nats_per_token, bits_per_byte, tokens, window,
stride, weights_bytes and bits_per_weight, and with --against
reference_perplexity, kl_mean, kl_median, kl_p99, kl_error (the standard error
of the mean) and same_top. A number that is not finite, as after an overflow,
is null. Where a precision fails or Ctrl-C ends the command, the rows before
it are there.
"""
ITSELF = "itself"


class Format(enum.StrEnum):
    """The format of printed results."""

    table = "table"
    markdown = "markdown"
    json = "json"


Text = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        show_default=False,
        help="Text to measure on: a file with one document, or a .jsonl file with "
        '{"text": ...} on each line. By default the held-out text that comes with mpjax.',
    ),
]
PrecisionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        "--precisions",
        metavar="W4A16KV8",
        show_default=False,
        help="Precisions to measure, as `mpjax --help` explains, with commas between them; may "
        "be given several times. Without a KV part the cache has 16 bits. By default every "
        "weight format and KV format; for a quantised checkpoint KV16, KV8 and KV4.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER_OR_ID",
        show_default=False,
        help="Model to compare with: a folder or hub id, or `itself` for the model in 16 bits. "
        "Both are on the device.",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="The most tokens that a prediction depends on. By default 1024, or the model's "
        "positions if it has fewer.",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="Join the documents by empty lines, and cut them into windows that begin so many "
        "tokens after each other. By default each document is read on its own.",
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        show_default=False,
        help="Text on which to measure the cache scales that KV8s needs and KVfp8 can use. "
        "They replace the checkpoint's scales.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON, like --format json.")]
Output = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        show_default=False,
        help="Also write the results to a JSON file, which is replaced after each row.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        show_default=False,
        help="Also draw divergence and perplexity over the bits of a weight, as SVG; needs "
        "--against and matplotlib.",
    ),
]


def command(
    source: options.Source = None,
    model: options.SourceOption = None,
    text: Text = None,
    precision: PrecisionOption = None,
    against: Against = None,
    window: Window = None,
    stride: Stride = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of windows to read together.")] = 8,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    calibrate: Calibrate = None,
    format: Annotated[Format, typer.Option(help="Format of the printed results.")] = Format.table,
    json: Json = False,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Measure the perplexity of a model, or its distance from another."""
    import mpjax
    from mpjax.loading import find_folder, require_loadable

    _require_usage(format, json, output, plot, against)
    source = options.one_source(source, model)
    folder = find_folder(mpjax.bundled_model() if source is None else source)
    chosen = _grouped(_read_precisions(precision) if precision else _defaults(folder))
    if text is None:
        text = mpjax.bundled_model() / "held_out.jsonl"
    samples = None if calibrate is None else options.read_documents(calibrate)
    if samples is not None and not any(one.kv.scaling for one in chosen):
        raise typer.BadParameter(
            "no precision has a cache with scales to measure: choose KV8s or KVfp8",
            param_hint="--calibrate",
        )
    documents = options.read_documents(text)
    reference = str(folder) if against == ITSELF else against
    require_loadable(folder, chosen, dtype=dtype, devices=devices, calibrated=samples is not None)

    def load(source: str, precision: Precision | None) -> LanguageModel:
        return options.load(source, precision, dtype, max_positions, devices)

    other = None if reference is None else _in_16_bits(load(reference, None))
    score = _scoring(other, documents, {"window": window, "stride": stride, "batch": batch})
    measured = _measure(chosen, lambda precision: load(str(folder), precision), score, samples)
    files = {"text": text.name, "calibration": None if calibrate is None else str(calibrate)}
    models = {
        "model": folder.name,
        "reference": None if reference is None else Path(reference).name,
    }
    result = models | files | _circumstances(documents, batch) | {"rows": []}
    _report(result, measured, Format.json if json else format, output)
    if plot is not None:
        from mpjax.bench import agreement_plot

        agreement_plot.draw(result["rows"], plot)


def _require_usage(
    format: Format, json: bool, output: Path | None, plot: Path | None, against: str | None
) -> None:
    """Checks options before the long run.

    Raises BadParameter for options that contradict each other, OSError for an output that can't be
    written, and ValueError for a plot without matplotlib.
    """
    from mpjax.files.atomic_write import require_writable

    if json and format is Format.markdown:
        raise typer.BadParameter("results are printed in one format", param_hint="--json")
    for path in (output, plot):
        if path is not None:
            require_writable(path)
    if plot is None:
        return
    if against is None:
        raise typer.BadParameter("a plot compares models: give --against", param_hint="--plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install matplotlib")


def _read_precisions(texts: list[str]) -> list[Precision]:
    """Parses comma-separated precisions; one without a KV part gets a 16-bit KV cache."""
    names = [name.strip() for text in texts for name in text.split(",")]
    return [
        options.parse_precision(name if re.search(r"K\w*V", name, re.IGNORECASE) else f"{name}KV16")
        for name in names
    ]


def _in_16_bits(lm: LanguageModel) -> LanguageModel:
    """The reference model: the same with a 16-bit KV cache."""
    from mpjax.kernels import KVFormat

    return dataclasses.replace(lm, kv_format=KVFormat())


def _scoring(
    reference: LanguageModel | None, documents: list[str], arguments: dict[str, Any]
) -> Callable[[LanguageModel], Evaluation]:
    """The function that measures a model, alone or against a reference."""
    from mpjax.evaluation.comparison import compare
    from mpjax.evaluation.perplexity import evaluate

    if reference is None:
        return lambda lm: evaluate(lm, documents, **arguments)
    return lambda lm: compare(lm, reference, documents, **arguments)


def _report(
    result: dict[str, Any], measured: Iterable[dict[str, Any]], format: Format, output: Path | None
) -> None:
    """Adds each measured row to the result, saves the result to `output`, and prints the row.

    JSON is one object, printed at the end, also after an error in a later row.
    """
    from mpjax.files.atomic_write import atomic_write

    rows, table = result["rows"], None
    try:
        for row in measured:
            rows.append(row)
            if output is not None:
                atomic_write(output, to_json(result, indent=1) + "\n")
            if format is not Format.json:
                headers, cells = table_of(rows)
                table = table or tables.Growing(headers, is_markdown=format is Format.markdown)
                write(table.add(cells[-1]))
    finally:
        if format is Format.json and rows:
            print_json(result)


def _defaults(folder: Path) -> list[Precision]:
    """The precisions to measure by default.

    For a quantised checkpoint only the KV formats differ, because only 16-bit weights can be
    quantised.
    """
    from mpjax.checkpoint import huggingface
    from mpjax.checkpoint.description import is_saved

    if is_saved(folder) or huggingface.read_config(folder).get("quantization_config") is not None:
        return _read_precisions(list(CACHE_PRECISIONS))
    return _read_precisions([*WEIGHT_PRECISIONS, *BOTH_PRECISIONS])


def _grouped(precisions: list[Precision]) -> list[Precision]:
    """The precisions, grouped by their weights' precision, so that each is loaded once."""
    weights = list(dict.fromkeys(precision.of_weights for precision in precisions))
    return sorted(precisions, key=lambda precision: weights.index(precision.of_weights))


def _measure(
    precisions: list[Precision],
    load: Callable[[Precision], LanguageModel],
    score: Callable[[LanguageModel], Evaluation],
    samples: list[str] | None,
) -> Iterator[dict[str, Any]]:
    """Measures a row for each precision, in the order of `_grouped`.

    samples: calibration texts for caches with static scales, or None.
    """
    from mpjax.quantization.calibration import calibrate_cache

    for _, group in itertools.groupby(precisions, lambda precision: precision.of_weights):
        lm = None  # frees the weights before the next are loaded
        for precision in group:
            lm = load(precision) if lm is None else lm
            lm = dataclasses.replace(lm, kv_format=precision.kv)
            if samples is not None and precision.kv.scaling is not None:
                lm = calibrate_cache(lm, samples)
            found = score(lm)
            yield {
                "precision": lm.precision,
                **dataclasses.asdict(found),
                "weights_bytes": lm.nbytes,
                "bits_per_weight": lm.bits_per_weight,
            }


def _circumstances(documents: list[str], batch: int) -> dict[str, Any]:
    """The settings that influence the results, besides models and files."""
    import jax

    import mpjax
    from mpjax import environment
    from mpjax.kernels.device import default_device

    device = default_device()
    return {
        "documents": len(documents),
        "bytes": sum(len(document.encode()) for document in documents),
        "batch": batch,
        "device": f"{device.platform}: {device.device_kind}",
        "versions": {"mpjax": mpjax.__version__, "jax": jax.__version__},
        "command": environment.command_line(),
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The headers and cells of rows; Δ is the change from the reference, or from the first row."""
    is_compared = "kl_mean" in rows[0]
    shown: list[dict[str, Any]] = []
    for row in rows:
        base = row["reference_perplexity"] if is_compared else rows[0]["perplexity"]
        rise = 100 * (row["perplexity"] / base - 1) if is_compared or shown else None
        shown.append({**row, "rise": rise})
    return tables.table(COLUMNS_OF_COMPARISONS if is_compared else COLUMNS, shown)

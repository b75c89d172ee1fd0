"""Options that several commands share, and functions that read them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mpjax.language_model import LanguageModel
    from mpjax.precision import Precision
    from mpjax.sampling import Sampling

SOURCE_HELP = (
    "Folder of a Hugging Face checkpoint or of one that `mpjax convert` wrote, or a hub id such as "
    "Qwen/Qwen3-8B-AWQ. By default the small model that comes with mpjax, which writes Python."
)


class Dtype(enum.StrEnum):
    """The dtypes that a model can compute in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


Source = Annotated[str | None, typer.Argument(help=SOURCE_HELP, show_default=False)]
Model = Annotated[
    str | None, typer.Option(metavar="FOLDER_OR_ID", help=SOURCE_HELP, show_default=False)
]
PrecisionText = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="W4A16KV8",
        help="Bits of weights, activations and KV cache, as `mpjax --help` explains. By default "
        "weights as in the checkpoint, and a 16-bit cache.",
        show_default=False,
    ),
]
ComputeDtype = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="What to compute in; the checkpoint's by default."),
]
MaxPositions = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="Tokens that a sequence may have, prompt and new ones together; by default as many as "
        "the checkpoint says.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Draw from the softmax of logits / temperature; greedy without it."),
]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the likeliest tokens that make up this probability.")
]
MinP = Annotated[
    float | None,
    typer.Option(help="Draw from tokens at least this share as likely as the likeliest."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, makes tokens that were there already less likely.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the draws.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End before this text; may be given several times.", show_default=False),
]


def parse_precision(text: str) -> Precision:
    """Parses a precision; a text that can't be read is wrong usage of --precision."""
    from mpjax.precision import Precision

    try:
        return Precision.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--precision") from error


def sampling_options(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
    min_new_tokens: int = 0,
) -> Sampling:
    """The Sampling of the options; values out of range are wrong usage."""
    from mpjax.sampling import Sampling

    try:
        least = min_new_tokens or None
        return Sampling(temperature, top_k, top_p, min_p, repetition_penalty, least)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def load(
    source: str | None,
    precision: str | Precision | None,
    dtype: Dtype | None,
    max_positions: int | None = None,
) -> LanguageModel:
    """Loads the model that the options name; the bundled one if `source` is None."""
    import mpjax

    if isinstance(precision, str):
        precision = parse_precision(precision)

    return mpjax.load(
        mpjax.bundled_model() if source is None else source,
        precision=precision,
        dtype=None if dtype is None else dtype.value,
        max_positions=max_positions,
    )


def read_documents(path: Path) -> list[str]:
    """Reads the texts of a file: the whole file, or for .jsonl {"text": ...} on each line."""
    from mpjax.arguments import read_text
    from mpjax.evaluation import read_held_out

    return read_held_out(path) if path.suffix == ".jsonl" else [read_text(path)]

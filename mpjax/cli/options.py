"""Options that several commands share, and functions that read them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpjax.cli import output

if TYPE_CHECKING:
    from mpjax.language_model import LanguageModel
    from mpjax.precision import Precision
    from mpjax.sampling import Sampling
    from mpjax.speculation.proposer import Proposer

SOURCE_HELP = (
    "Folder of a Hugging Face checkpoint, GGUF file, folder that `mpjax convert` wrote, or hub id "
    "such as Qwen/Qwen3-8B-AWQ. By default the small model that comes with mpjax, "
    "which writes Python."
)


class Dtype(enum.StrEnum):
    """The dtypes that a model can compute in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class ExpertsKind(enum.StrEnum):
    """How several devices divide experts; see `mpjax.load`."""

    divided = "divided"
    whole = "whole"


SourceOption = Annotated[
    str | None,
    typer.Option("--model", metavar="FOLDER_OR_ID", help="The same as SOURCE.", show_default=False),
]
Source = Annotated[str | None, typer.Argument(help=SOURCE_HELP, show_default=False)]
Model = Annotated[
    str | None, typer.Option(metavar="FOLDER_OR_ID", help=SOURCE_HELP, show_default=False)
]
PrecisionText = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="W4A16KV8",
        help="Formats of weights, activations and KV cache; `mpjax --help` explains them. By "
        "default the weights keep the checkpoint's format, and the cache has 16 bits, or its "
        "format in a model that `mpjax convert` wrote.",
        show_default=False,
    ),
]
ComputeDtype = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Dtype of the computation; the checkpoint's by default."),
]
MaxPositions = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default=False,
        help="The most tokens of a sequence, prompt and new tokens together; the checkpoint's "
        "number by default.",
    ),
]
DeviceCount = Annotated[
    int,
    typer.Option(
        "--devices", min=1, help="Number of devices (GPUs) among which the model is divided."
    ),
]
Experts = Annotated[
    ExpertsKind,
    typer.Option(
        "--experts",
        help="Whether each of several devices has a part of every expert, or some experts whole.",
    ),
]
CacheMemory = Annotated[
    float | None,
    typer.Option(
        "--cache-memory",
        min=1e-6,
        show_default="0.9",
        help="Bytes of the cache, or the share of free memory.",
    ),
]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        metavar="FILE.jsonl",
        help='Lengths from a file: {"prompt_tokens": 900, "new_tokens": 120} on each line.',
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(dir_okay=False, metavar="FILE.json", help="Write each program's seconds."),
]
ChunkTokens = Annotated[
    int, typer.Option("--chunk-tokens", min=1, help="The most tokens of prompts in a program.")
]
UsualChunkTokens = Annotated[
    int | None,
    typer.Option(
        "--chunk-tokens",
        min=1,
        show_default="4096, on a CPU 256",
        help="The most tokens of prompts in a program.",
    ),
]
MaxGap = Annotated[
    float | None,
    typer.Option(
        "--max-gap",
        min=1e-6,
        show_default="0.05, up to 4 times where more requests wait than decode",
        help="The most seconds that a request which decodes waits for others' prompts; with inf "
        "prompts go first.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Draw tokens from the softmax of logits / temperature; 0 always takes the most likely "
        "token (greedy).",
        show_default="the model's own, or greedy",
    ),
]
TopK = Annotated[int | None, typer.Option(help="Draw from the k most likely tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from the most likely tokens whose probabilities sum to p."),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Draw from tokens at least p times as likely as the most likely one."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1, tokens that the text already has become less likely."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random draws.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Text before which the completion ends; may be given several times.",
        show_default=False,
    ),
]

Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="ngram:4:3",
        help="Propose tokens and verify several at a time: ngram:4:3 proposes the 4 tokens that "
        "followed the last 3 before, for texts that repeat themselves; draft:4:FOLDER_OR_ID 4 "
        "tokens of a smaller model with the same vocabulary (with @W4A16KV8 behind it in this "
        "precision). The text stays the same, or has the same distribution.",
        show_default=False,
    ),
]


def one_source(source: str | None, model: str | None) -> str | None:
    """The model of an argument or of --model, which may not both be given; None without them."""
    if source is not None and model is not None:
        raise typer.BadParameter(f"{source} is a model too: give one of them", param_hint="--model")
    return model if source is None else source


def parse_precision(text: str) -> Precision:
    """Parses a precision; a text that can't be read is wrong usage of --precision."""
    from mpjax.precision import Precision

    try:
        return Precision.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--precision") from error


def parse_speculate(text: str | None) -> Proposer | None:
    """The proposer of --speculate, whose draft model is loaded; None without the option."""
    from mpjax.errors import CheckpointError
    from mpjax.speculation.spelling import parse

    if text is None:
        return None
    try:
        return parse(text)
    except CheckpointError:  # of the draft model, whatever the option says
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--speculate") from error


def sampling_options(**options: float | None) -> dict[str, float]:
    """The fields of a Sampling that the options set; values out of range are wrong usage."""
    from mpjax.sampling import Sampling

    given = {name: value for name, value in options.items() if value is not None}
    try:
        Sampling.of({"temperature": 1.0} | given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return given


def choose_sampling(lm: LanguageModel, given: Mapping[str, float]) -> Sampling:
    """The model's own sampling with the fields that options set; a line on stderr shows it.

    The line is left out where neither the model nor an option says how tokens are drawn. A filter
    without a temperature, of a model that has none, is wrong usage.
    """
    from mpjax.sampling import Sampling

    try:
        chosen = Sampling.of(given, lm.sampling)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if lm.sampling is not None:
        output.note(f"sampling: {chosen}; the model's own is {lm.sampling}")
    return chosen


def load(
    source: str | None,
    precision: str | Precision | None,
    dtype: Dtype | None,
    max_positions: int | None = None,
    devices: int = 1,
    experts: ExpertsKind = ExpertsKind.divided,
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
        devices=devices,
        experts=experts.value,
    )


def require_target(target: Path, overwrite: bool) -> None:
    """Raises ValueError for a folder to which `mpjax.save` would not write a model.

    It raises the same, but only after the model has been made.
    """
    from mpjax.checkpoint import saving, staging

    staging.clean_up(target)  # restores a model that a killed save has moved away
    if not overwrite and target.is_dir() and any(target.iterdir()):
        raise ValueError(
            f"{target} is not empty: choose another folder, or replace a model saved there with "
            "--overwrite"
        )
    saving.require_writable(target, overwrite)


def read_documents(path: Path) -> list[str]:
    """Reads the texts of a file: the whole file, or for .jsonl {"text": ...} on each line."""
    from mpjax.arguments import read_text
    from mpjax.evaluation import read_held_out

    return read_held_out(path) if path.suffix == ".jsonl" else [read_text(path)]

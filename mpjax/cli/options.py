"""Options that several commands share, and functions that parse them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import output

if TYPE_CHECKING:
    from mpjax.generation.speculation.proposer import Proposer
    from mpjax.language_model import LanguageModel
    from mpjax.precision import Precision
    from mpjax.sampling.settings import Sampling

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
ChunkTokens = Annotated[
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
        "precision); mtp:3 3 tokens of the model's own multi-token-prediction head; "
        "eagle:3:FOLDER_OR_ID 3 tokens of an EAGLE-3 head. The text stays the same, or has the "
        "same distribution.",
        show_default=False,
    ),
]

Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="An adapter (LoRA) for all prompts: its folder, or hub id, with or without a name.",
        show_default=False,
    ),
]
AdapterList = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="An adapter (LoRA) that clients can name as their model; may be given several times.",
        show_default=False,
    ),
]


def parse_adapters(texts: Sequence[str | None] | None) -> dict[str, str]:
    """Adapter name → folder. The default name is that of the folder.

    Raises BadParameter for a repeated or empty name.
    """
    found: dict[str, str] = {}
    for text in filter(None, texts or []):
        name, is_named, folder = text.partition("=")
        folder = folder if is_named else text
        name = name if is_named else Path(folder).name
        if not name or not folder or name in found:
            raise typer.BadParameter(
                f"{text} is no NAME=FOLDER with a name of its own", param_hint="--adapter"
            )
        found[name] = folder
    return found


def one_source(source: str | None, model: str | None) -> str | None:
    """The model given as the argument or as --model; None without. BadParameter for both."""
    if source is not None and model is not None:
        raise typer.BadParameter(f"{source} is a model too: give one of them", param_hint="--model")
    return model if source is None else source


@contextlib.contextmanager
def wrong_usage(option: str | None = None) -> Iterator[None]:
    """Raises a ValueError of the body as BadParameter of an option, or of the command."""
    from mpjax.errors import CheckpointError

    try:
        yield
    except CheckpointError:  # the fault is the checkpoint's, not the option's
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def split(text: str) -> tuple[str, ...]:
    """Splits a text at its commas; repeated parts are dropped."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def numbers(option: str, text: str, least: int = 0) -> tuple[int, ...]:
    """Parses an option's comma-separated integers ≥ `least`. Raises BadParameter for others."""
    parts = split(text)
    if wrong := [part for part in parts if not part.isdecimal() or int(part) < least]:
        raise typer.BadParameter(f"{wrong[0]!r} is not a number, such as 64", param_hint=option)
    return tuple(map(int, parts))


def parse_precision(text: str) -> Precision:
    """Parses a precision. Raises BadParameter of --precision if that fails."""
    from mpjax.precision import Precision

    with wrong_usage("--precision"):
        return Precision.parse(text)


def parse_speculate(text: str | None) -> Proposer | None:
    """The proposer of --speculate, with its draft model loaded; None without the option."""
    from mpjax.generation.speculation.spelling import parse

    with wrong_usage("--speculate"):
        return None if text is None else parse(text)


def head_options(text: str | None) -> dict[str, Any]:
    """The arguments of mpjax.load with which the head of --speculate is loaded, if it is one."""
    from mpjax.generation.speculation.spelling import head_options

    with wrong_usage("--speculate"):
        return head_options(text)


def sampling_options(**options: float | None) -> dict[str, float]:
    """The fields of a Sampling that options set. Raises BadParameter for values out of range."""
    from mpjax.sampling.settings import Sampling

    given = {name: value for name, value in options.items() if value is not None}
    with wrong_usage():
        Sampling.of({"temperature": 1.0} | given)
    return given


def choose_sampling(lm: LanguageModel, given: Mapping[str, float]) -> Sampling:
    """The model's own sampling settings, overridden by options; a line on stderr shows them.

    The line is omitted if neither the model nor an option has settings. Raises BadParameter for a
    filter without a temperature, if the model has none either.
    """
    from mpjax.sampling.settings import Sampling

    with wrong_usage():
        chosen = Sampling.of(given, lm.sampling)
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
    **reading: Any,
) -> LanguageModel:
    """Loads a model by the shared options; the bundled model if `source` is None.

    reading: further arguments of `mpjax.load`.
    """
    import mpjax

    if isinstance(precision, str):
        precision = parse_precision(precision)

    return mpjax.load(
        mpjax.bundled_model() if source is None else source,
        precision=precision,
        dtype=None if dtype is None else dtype.value,
        max_positions=max_positions,
        devices=devices,
        **{"experts": experts.value, **reading},
    )


def require_target(target: Path, overwrite: bool) -> None:
    """Raises ValueError for a folder to which `mpjax.save` would not write a model.

    `mpjax.save` would raise the same error, but only after the model has been computed.
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
    """The documents of a file: the whole file, or in a .jsonl file {"text": ...} on each line."""
    from mpjax.arguments import read_text
    from mpjax.evaluation.perplexity import read_held_out

    return read_held_out(path) if path.suffix == ".jsonl" else [read_text(path)]

"""`mpjax tune`: finds the fastest plans of products, experts and attention on this GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.console
import rich.progress
import typer

from mpjax.cli import options

if TYPE_CHECKING:
    from mpjax.tuning.products import Job, Outcome, Shape

NAME = "tune"
DEFAULT_FORMATS = "uint4:g128,uint4:g128:sym"
DEFAULT_KV_FORMATS = "KV16,KV8,KV4"
EPILOG = """\b
Examples:
  mpjax tune --model qwen3-8b
  mpjax tune --model Qwen3-8B-AWQ --formats uint4:g128,uint8:g128
  mpjax tune --shapes 4096x24576,12288x4096 --rows 1,64 --formats table3:g64
  mpjax tune --experts qwen3-30b-a3b,mixtral-8x7b --formats uint4:g128
  mpjax tune --attention decode --kv-formats KV8,KV4
  mpjax tune --attention b16-h32/8-d128-c8192,b1-h32/8-d128-c32768-q2048

\b
Measures configurations of the kernels for some shapes, and writes the fastest
to a table. Later processes on a GPU of the same kind use it for these shapes.
A checkpoint whose zero points are all in the middle, such as a symmetric GPTQ
one, is loaded in a format with :sym, which has its own plans.

\b
A shape of attention, such as b16-h32/8-d128-c8192-q2048, gives the batch, the
query and KV heads, the channels of a head, the tokens for which the cache has
room (max_tokens), and the new tokens if more than 1. Its plan also serves
sizes up to a fifth smaller, and any number of tokens in the cache.

\b
Plans are looked up in the tables in the folder MPJAX_TUNED (by default
mpjax/tuned in XDG_CACHE_HOME or in ~/.cache), then in the tables that come
with mpjax; without an entry in either, a rule chooses. If MPJAX_TUNED is set
to an empty text, the rule always chooses. `mpjax env` lists the tables that
are in use.

\b
Every result is saved at once. After an interrupt, the same command goes on
where it stopped.
"""

ModelShapes = Annotated[
    str | None,
    typer.Option(
        metavar="NAME_OR_FOLDER",
        show_default=False,
        help="Tune the products of a model: qwen3-8b, llama3-70b or llama3-1-8b, a checkpoint's "
        "folder, or a hub id.",
    ),
]
ProductShapes = Annotated[
    str | None,
    typer.Option(
        metavar="KxN,...",
        show_default=False,
        help="Tune products with weights of these shapes, input x output channels.",
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="M,...",
        show_default=False,
        help="Numbers of rows of x (tokens of a step), each rounded up to a bucket: 7, 15, 31, 64, "
        "128 ... 8192, or 8, 16, 32 for multiples of 8; with --experts up to a power of two. By "
        "default all buckets.",
    ),
]
ExpertsShapes = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE,...",
        show_default=False,
        help="Tune the products of tokens and their experts: of qwen3-30b-a3b, mixtral-8x7b or "
        "gpt-oss-20b, or of one product, such as mixtral-8x7b.down.",
    ),
]
AttentionShapes = Annotated[
    str | None,
    typer.Option(
        metavar="SHAPE,...",
        show_default=False,
        help="Tune attention over the paged cache, for shapes such as b16-h32/8-d128-c8192, or the "
        "sets decode and prefill.",
    ),
]
TableFolder = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        show_default=False,
        help="Folder of the table. By default MPJAX_TUNED, or mpjax/tuned in the cache folder.",
    ),
]


def command(
    model: ModelShapes = None,
    shapes: ProductShapes = None,
    formats: Annotated[
        str, typer.Option(metavar="FORMAT,...", help="Weight formats of the products.")
    ] = DEFAULT_FORMATS,
    rows: Rows = None,
    experts: ExpertsShapes = None,
    attention: AttentionShapes = None,
    kv_formats: Annotated[
        str, typer.Option(metavar="FORMAT,...", help="KV formats of attention.")
    ] = DEFAULT_KV_FORMATS,
    output: TableFolder = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also measure shapes that the table already has.")
    ] = False,
) -> None:
    """Measure the fastest kernels for a model's shapes on this GPU."""
    from mpjax.kernels import UnsupportedError, device
    from mpjax.kernels.plans import tables

    if sum(given is not None for given in (model, shapes, experts, attention)) != 1:
        raise typer.BadParameter(
            "give exactly one of --model, --shapes, --experts and --attention",
            param_hint="--model",
        )
    wanted = None if shapes is None else _parse_shapes(shapes)
    make = _jobs(model, wanted, formats, rows, experts, attention, kv_formats)
    if reason := device.why_triton_cannot_run():
        raise UnsupportedError(
            f"tuning measures a CUDA GPU of compute capability 8.0 or newer: {reason}"
        )
    folder = output or tables.own_folder()
    if folder is None:
        raise ValueError(
            f"{tables.VARIABLE} is empty, so no tables are used: give --output, or unset "
            f"{tables.VARIABLE}"
        )
    path = folder / tables.file_name(device.kind())
    outcomes = _run(make(), path, again=again)
    for line in summary(outcomes, path):
        typer.echo(line)
    if failed := sum(outcome.entry is None for outcome in outcomes):
        raise ValueError(
            f"no configuration worked for {failed} of {len(outcomes)} jobs: the lines above give "
            "the reasons"
        )


def _jobs(
    model: str | None,
    shapes: list[Shape] | None,
    formats: str,
    rows: str | None,
    experts: str | None,
    attention: str | None,
    kv_formats: str,
) -> Callable[[], Sequence[Job]]:
    """A function that makes the options' jobs. Raises BadParameter for options that don't parse."""
    from mpjax.bench import attention as shapes_of_attention
    from mpjax.kernels import KVFormat, WeightFormat
    from mpjax.kernels.experts.shapes import named
    from mpjax.kernels.gemm.plans import BUCKETS
    from mpjax.tuning import attention as of_attention
    from mpjax.tuning import experts as of_experts
    from mpjax.tuning import products

    with options.wrong_usage("--formats"):
        packed = [WeightFormat.parse(part) for part in options.split(formats)]
    with options.wrong_usage("--kv-formats"):
        cached = [KVFormat.parse(part) for part in options.split(kv_formats)]
    counts = options.numbers("--rows", rows, least=1) if rows is not None else None
    if attention is not None:
        with options.wrong_usage("--attention"):
            attended = shapes_of_attention.named(options.split(attention))
        return lambda: of_attention.make_jobs(attended, cached)
    if experts is not None:
        with options.wrong_usage("--experts"):
            stacks = named(options.split(experts))
        return lambda: of_experts.make_jobs(stacks, packed, counts or of_experts.BUCKETS)
    return lambda: products.make_jobs(
        shapes or products.model_shapes(model or ""), packed, counts or BUCKETS
    )


def _run(jobs: Sequence[Job], path: Path, *, again: bool) -> list[Outcome]:
    """Runs the jobs, and writes a line about each outcome to stderr."""
    from mpjax.kernels import device
    from mpjax.tuning import products as tune

    outcomes: list[Outcome] = []
    with _progress() as bar:
        task = bar.add_task("tuning", total=len(jobs))
        try:
            for outcome in tune.run(jobs, path, device.kind(), tune.stamp(), again=again):
                outcomes.append(outcome)
                bar.console.print(describe(outcome), highlight=False, markup=False)
                bar.advance(task)
        except KeyboardInterrupt:
            bar.console.print("stopped: the same command goes on from here", markup=False)
            raise
    return outcomes


def _progress() -> rich.progress.Progress:
    columns = rich.progress.Progress.get_default_columns()
    return rich.progress.Progress(
        *columns,
        rich.progress.MofNCompleteColumn(),
        console=rich.console.Console(stderr=True, soft_wrap=True),
    )


def describe(outcome: Outcome) -> str:
    """A line about a job: the best plan and its time, and the time of the rule's plan."""
    if outcome.entry is None:
        return f"{outcome.job}: no configuration worked"
    plan, microseconds = outcome.entry
    line = f"{outcome.job}: {microseconds:.1f} µs, {plan.implementation}"
    if plan.config is not None:
        line += f" {plan.config}"
    if not outcome.trials:
        return f"{line} (known)"
    heuristic = outcome.heuristic_microseconds
    return line if heuristic is None else f"{line} (untuned {heuristic:.1f} µs)"


def summary(outcomes: list[Outcome], path: Path) -> list[str]:
    """Lines with the number of measured plans, and of skipped configurations by reason."""
    measured = sum(bool(outcome.trials) and outcome.entry is not None for outcome in outcomes)
    known = sum(not outcome.trials for outcome in outcomes)
    problems = sum((Counter(outcome.problems) for outcome in outcomes), Counter())
    skipped = (f"{count} configurations skipped: {it}" for it, count in problems.most_common())
    return [f"{path}: {measured} measured, {known} known before", *skipped]


def _parse_shapes(text: str) -> list[Shape]:
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)[x×]([1-9]\d*)\s*", part)
        if match is None:
            raise typer.BadParameter(
                f"can't read the shape {part!r}: expected KxN, such as 4096x24576",
                param_hint="--shapes",
            )
        shapes.append((int(match[1]), int(match[2])))
    return shapes

"""`mpjax bench`: measures kernels and whole models on this GPU, and the bounds of their speed.

All commands have one pattern: options define a sweep of cases, each measured row is saved at once,
and at the end come a table, for some commands a plot, and a check of every result against the
reference.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import rich.console
import rich.progress
import typer

from mpjax.cli import options
from mpjax.cli.bench_help import (
    ATTENTION_EPILOG,
    EPILOG,
    GEMM_EPILOG,
    GENERATE_EPILOG,
    MIXERS_EPILOG,
    SERVE_EPILOG,
    SUMS_EPILOG,
)
from mpjax.cli.compilation import CompilingCommand
from mpjax.cli.output import is_live, note

NAME = "bench"
WEIGHT_FORMATS = (
    "uint4:g128,uint8:g128,float8:g128,int8/int8,liquid4:g64/int8,int4:g128/int8,table4:g64,"
    "table3:g64,float8:gK/float8"
)
ROWS = "1,16,32,64,128,256,512,1024,4096"
SHAPES = "qwen3-8b"
MODELS = (
    "qwen3-8b, llama3.1-8b, llama3-70b, qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, qwen3.6-27b, "
    "qwen3.6-35b-a3b"
)
EXPERT_SHAPES = "qwen3-30b-a3b,mixtral-8x7b"
EXPERT_ROWS, EXPERT_FORMATS = "1,16,64,256,4096", "uint4:g128"
T = TypeVar("T")

app = typer.Typer(
    help="Measure kernels and whole models against this GPU's limits.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Implementation(enum.StrEnum):
    """The implementations of products with packed weights that an option can force."""

    triton = "triton"
    mosaic = "mosaic"
    dequantize = "dequantize"
    xla = "xla"


def _texts(metavar: str, help: str, show_default: bool = True) -> Any:
    """An option with several values, separated by commas."""
    return typer.Option(metavar=f"{metavar},...", help=help, show_default=show_default)


Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER|FILE.json",
        show_default=False,
        help="Folder or file to which results are saved.",
    ),
]
Plot = Annotated[bool, typer.Option(help="Draw a plot (SVG) beside the results; needs matplotlib.")]
Precisions = Annotated[str, _texts("W4A16KV8", "Precisions; `mpjax --help` explains them.")]
WeightFormats = Annotated[
    str, _texts("FORMAT", "Weight formats; by default the nine below.", show_default=False)
]
MatrixShapes = Annotated[
    str, _texts("NAME", "Models (qwen3-8b, llama3-70b), or single matrices (qwen3-8b.qkv).")
]
ForcedImplementation = Annotated[
    Implementation | None,
    typer.Option(help="Force an implementation; by default the plan's.", show_default=False),
]
InModel = Annotated[
    bool,
    typer.Option(
        "--in-model",
        help="Leave out the work of a model's other kernels: x comes already rounded for formats "
        "with 8-bit activations, and the terms of splits of K are not added.",
    ),
]
Rounded = Annotated[
    bool,
    typer.Option(
        "--rounded",
        help="Leave out only the rounding of x to 8 bits, which a norm or a gate does.",
    ),
]
OfExperts = Annotated[
    bool,
    typer.Option(
        "--experts",
        help="Measure the products of tokens with experts instead: of qwen3-30b-a3b and "
        "mixtral-8x7b (the default), and gpt-oss-20b. There is no plot.",
    ),
]
VerifiedTokens = Annotated[
    str, _texts("K", "Also measure steps that verify K proposed tokens.", show_default=False)
]
Layers = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="all",
        help="Number of the model's first layers that there are, where memory or time lacks for "
        "all: a layer's time does not depend on it.",
    ),
]
PieceTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="all",
        help="Tokens of each row's prompt that are read at a time, where memory lacks for the "
        "activations of all.",
    ),
]
AdapterCounts = Annotated[
    str,
    _texts(
        "COUNT",
        "Also measure rows with so many adapters; 0 for rows without in a model that has some.",
        show_default=False,
    ),
]
Rank = Annotated[int, typer.Option(min=1, help="Rank of the adapters.")]
Filled = Annotated[
    bool,
    typer.Option(
        "--filled",
        help="Read a prompt only in the first case of each precision, and fill the cache with "
        "random keys and values in the others, which is fast for long contexts.",
    ),
]
FromDisk = Annotated[
    bool,
    typer.Option(
        "--from-disk",
        help="Write an AWQ checkpoint (5 GB) to a temporary folder and measure the time to load "
        "it; by default the weights are made on the GPU.",
    ),
]
PromptLengths = Annotated[
    str, typer.Option(metavar="LENGTHS", help="1024, 512-2048, or lognormal:MEAN:SIGMA:MOST.")
]
NewLengths = Annotated[str, typer.Option(metavar="LENGTHS", help="New tokens of each request.")]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        metavar="FILE.jsonl",
        help='Lengths from a file: {"prompt_tokens": 900, "new_tokens": 120} on each line.',
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=1e-6, show_default="all at once", help="Requests per second, at random times."
    ),
]
SharedTokens = Annotated[int, typer.Option(min=0, help="Tokens with which every prompt begins.")]
LatePrompt = Annotated[
    int, typer.Option(min=0, help="Tokens of one more prompt, which comes when all decode.")
]
ChunkTokens = Annotated[
    int, typer.Option("--chunk-tokens", min=1, help="The most tokens of prompts in a program.")
]
StaticBatches = Annotated[
    int, typer.Option(min=0, help="Also measure static batches of so many requests.")
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER|ID",
        help='A model to load instead of random weights; with --precision "" in its own precision.',
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(dir_okay=False, metavar="FILE.json", help="Write each program's seconds."),
]


@app.command("gemm", cls=CompilingCommand, epilog=GEMM_EPILOG)
def gemm_command(
    formats: WeightFormats = WEIGHT_FORMATS,
    rows: Annotated[str, _texts("M", "Numbers of rows of x.")] = ROWS,
    shapes: MatrixShapes = SHAPES,
    implementation: ForcedImplementation = None,
    in_model: InModel = False,
    rounded: Rounded = False,
    experts: OfExperts = False,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure packed products against their floor and cuBLAS."""
    from mpjax.bench import experts as of_experts
    from mpjax.bench import gemm
    from mpjax.kernels.experts.shapes import named_mlps
    from mpjax.kernels.gemm.shapes import named

    title = "{shape}: K {K}, N {N}"
    if experts:  # options that were not given get the experts' defaults
        with options.wrong_usage():
            of_tokens = of_experts.Sweep(
                named_mlps(options.split(EXPERT_SHAPES if shapes == SHAPES else shapes)),
                options.numbers("--rows", EXPERT_ROWS if rows == ROWS else rows),
                options.split(EXPERT_FORMATS if formats == WEIGHT_FORMATS else formats),
            )
        title = "{shape}: {per_token} of {experts} experts, K {K}, N {N}"
        _check(of_experts, _run("experts", of_experts, of_tokens, output, title))
        return
    with options.wrong_usage():
        sweep = gemm.Sweep(
            named(options.split(shapes)),
            options.numbers("--rows", rows),
            options.split(formats),
            None if implementation is None else implementation.value,
            in_model,
            rounded,
        )
    _check(gemm, _run("gemm", gemm, sweep, output, title, plot=plot))


@app.command("attention", cls=CompilingCommand, epilog=ATTENTION_EPILOG)
def attention_command(
    formats: Annotated[str, _texts("FORMAT", "KV formats, or uncached.")] = "KV16,KV8,KV4",
    shapes: Annotated[
        str,
        _texts(
            "SHAPE", "Shapes (b8-h32/8-d128-c32768), or sets (decode, ragged, prefill, latent)."
        ),
    ] = "decode,prefill",
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure paged attention against its floor and cuDNN."""
    from mpjax.bench import attention

    with options.wrong_usage():
        sweep = attention.Sweep(attention.named(options.split(shapes)), options.split(formats))
    # The plot shows only decoding that cuDNN supports too.
    plot = plot and any(shape.queries == 1 and not shape.rotary for shape in sweep.shapes)
    _check(attention, _run("attention", attention, sweep, output, "paged attention", plot=plot))


@app.command("mixers", cls=CompilingCommand, epilog=MIXERS_EPILOG)
def mixers_command(
    shapes: Annotated[
        str | None, _texts("NAME", "Models whose layers are measured; by default all.")
    ] = None,
    rows: Annotated[str, _texts("ROWS", "Rows that read a token each; 0: none.")] = "1,16,64",
    prompt_tokens: Annotated[
        str, _texts("TOKENS", "Numbers of tokens of a prompt; 0 for none.")
    ] = "4096,32768",
    output: Output = None,
) -> None:
    """Measure layers with a state against their floor and cuDNN."""
    from mpjax.bench import mixers
    from mpjax.kernels.recurrent.shapes import PUBLISHED, named

    with options.wrong_usage():
        sweep = mixers.Sweep(
            PUBLISHED if shapes is None else named(options.split(shapes)),
            () if rows == "0" else options.numbers("--rows", rows),
            () if prompt_tokens == "0" else options.numbers("--prompt-tokens", prompt_tokens),
        )
    _check(mixers, _run("mixers", mixers, sweep, output, "{shape}"))


@app.command("generate", cls=CompilingCommand, epilog=GENERATE_EPILOG)
def generate_command(
    precision: Precisions = "W4A16KV8",
    shapes: Annotated[str, _texts("NAME", f"Models: {MODELS}.")] = SHAPES,
    batch: Annotated[str, _texts("ROWS", "Numbers of rows that are decoded together.")] = "1",
    prompt_tokens: Annotated[
        str, _texts("TOKENS", "Numbers of tokens of each row's prompt.")
    ] = "2048",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each row.")] = 256,
    devices: Annotated[
        str, _texts("COUNT", "Numbers of devices among which the model is divided.")
    ] = "1",
    experts: options.Experts = options.ExpertsKind.divided,
    speculate: VerifiedTokens = "",
    adapters: AdapterCounts = "",
    rank: Rank = 16,
    layers: Layers = None,
    piece_tokens: PieceTokens = None,
    filled: Filled = False,
    from_disk: FromDisk = False,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure tokens/s of a whole model against its roofline."""
    from mpjax.bench import adapters as of_adapters
    from mpjax.bench import generate, speculation, tables

    common = (
        generate.Sweep,
        {
            "precisions": options.split(precision),
            "batches": options.numbers("--batch", batch),
            "prompt_tokens": options.numbers("--prompt-tokens", prompt_tokens),
            "new_tokens": new_tokens,
            "from_disk": from_disk,
            "filled": filled,
            "devices": options.numbers("--devices", devices),
            "speculate": options.numbers("--speculate", speculate) if speculate else (),
            "adapters": options.numbers("--adapters", adapters) if adapters else (),
            "rank": rank,
            "piece_tokens": piece_tokens,
            "experts": experts.value,
        },
    )
    with options.wrong_usage():
        sweeps = {name: _of_model(name, layers, *common) for name in options.split(shapes)}
    everything = []
    for name, sweep in sweeps.items():
        file = "generate" if name == SHAPES else f"generate-{name}"
        file += "" if layers is None else f"-{layers}-layers"
        title = f"{name}'s shapes, random weights, {new_tokens} new tokens"
        title += "" if layers is None else f", {layers} layers"
        measured = _run(file, generate, sweep, output, title, plot=plot and not adapters)
        if speculate:
            steps = tables.table(speculation.COLUMNS, speculation.rows(measured))
            tables.show("steps of speculation, over a step", *steps)
        if adapters:
            cells = tables.table(of_adapters.COLUMNS, (r for r in measured if "adapters" in r))
            tables.show("beside a model without adapters", *cells)
        everything += measured
    _check(generate, everything)


def _of_model(name: str, layers: int | None, sweep: type, settings: dict[str, Any]) -> Any:
    """The sweep of a published model, or of its first layers, or of `--model`."""
    from mpjax.bench.random_model import published_layers

    if settings.get("model") and (layers is not None or name != SHAPES):
        raise ValueError("--shapes and --layers choose random weights, but --model is given")
    decoder, config = published_layers(name, layers)
    return sweep(**settings, config=config, decoder=decoder)


@app.command("serve", cls=CompilingCommand, epilog=SERVE_EPILOG)
def serve_command(
    precision: Precisions = "W4A16KV8",
    shapes: Annotated[str, typer.Option(metavar="NAME", help=f"A model: {MODELS}.")] = SHAPES,
    model: ServedModel = None,
    layers: Layers = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 256,
    prompt_tokens: PromptLengths = "1024",
    new_tokens: NewLengths = "512",
    lengths: LengthsFile = None,
    rate: Rate = None,
    shared_tokens: SharedTokens = 0,
    late_prompt: LatePrompt = 0,
    slots: Annotated[int, typer.Option(min=1, help="The most requests at a time.")] = 256,
    chunk_tokens: ChunkTokens = 4096,
    max_gap: options.MaxGap = None,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps of a program.")] = 8,
    cache_memory: options.CacheMemory = None,
    share: Annotated[bool, typer.Option(help="Share the pages of equal beginnings.")] = True,
    speculate: options.Speculate = None,
    static: StaticBatches = 0,
    engine: Annotated[bool, typer.Option(help="Measure an engine, not batches alone.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often it runs; the last counts.")] = 2,
    devices: options.DeviceCount = 1,
    trace: TraceFile = None,
    output: Output = None,
) -> None:
    """Measure an engine under load: tokens/s, and their times."""
    from mpjax.bench import serve, tables
    from mpjax.bench.lengths import Lengths, read_file
    from mpjax.files.atomic_write import require_writable

    with options.wrong_usage():
        drawn = Lengths.parse(prompt_tokens), Lengths.parse(new_tokens)
        pairs = tuple(read_file(lengths)) if lengths else ()
        settings = {
            "precisions": options.split(precision) if precision else ("",),
            "load": serve.Load(requests, *drawn, pairs, rate, shared_tokens, late_prompt),
            "slots": slots,
            "chunk_tokens": chunk_tokens,
            "max_gap": max_gap,
            "steps": steps,
            "cache_memory": cache_memory,
            "share_prefixes": share,
            "speculate": options.parse_speculate(speculate),
            "head": options.head_options(speculate),
            "static": static,
            "engine": engine,
            "rounds": rounds,
            "model": model,
            "devices": devices,
            "trace": trace,
        }
        sweep = _of_model(shapes, layers, serve.Sweep, settings)
    if trace is not None:
        require_writable(trace)
    of = model or f"{shapes}'s shapes, random weights"
    measured = _run("serve", serve, sweep, output, f"{of}, {requests} requests")
    tables.show("under the keys of `vllm bench serve`", *serve.vllm_table(measured))
    _check(serve, measured)


@app.command("sums", cls=CompilingCommand, epilog=SUMS_EPILOG)
def sums_command(
    devices: Annotated[int, typer.Option(min=2, help="Number of devices.")] = 2,
    sizes: Annotated[str, _texts("KIB", "Sizes of a device's array, in KiB.")] = (
        "8,16,64,256,1024,4096,16384,65536"
    ),
    dtypes: Annotated[str, _texts("DTYPE", "Dtypes.")] = "bfloat16,float32",
    output: Output = None,
) -> None:
    """Measure sums over devices, as a divided model has."""
    from mpjax.bench import sums

    with options.wrong_usage():
        sweep = sums.Sweep(devices, options.numbers("--sizes", sizes), options.split(dtypes))
    _run("sums", sums, sweep, output, "sums over devices")


def _run(
    name: str,
    benchmark: ModuleType,
    sweep: Any,
    output: Path | None,
    title: str,
    *,
    plot: bool = False,
) -> list[dict[str, Any]]:
    """Measures a sweep; saves, prints and plots its rows; returns them.

    title: a table's title, as a format string of a row's values.
    """
    from mpjax.bench import measure, tables

    measure.require_gpu()
    folder = measure.results_folder() if output is None else output
    if folder.suffix == ".json":
        folder, name = folder.parent, folder.stem
    measured: list[dict[str, Any]] = []
    path = folder / f"{name}.json"
    for row in _progress(name, benchmark.run(sweep), sweep.cases):
        measured.append(row)
        # Saved after each row, because a long sweep may be interrupted.
        path = measure.save(name, {"results": measured}, folder)
    note(f"saved {path}")
    by_title: dict[str, list[dict[str, Any]]] = {}
    for row in measured:
        by_title.setdefault(title.format_map(row), []).append(row)
    for title, rows in by_title.items():
        tables.show(title, *tables.table(benchmark.COLUMNS, rows))
    if plot and importlib.util.find_spec("matplotlib") is None:
        note("no plot: matplotlib is missing (pip install matplotlib)")
    elif plot:
        from mpjax.bench import roofline

        kind = benchmark.__name__.rpartition(".")[2]
        getattr(roofline, f"draw_{kind}")(measured, path.with_suffix(".svg"))
        note(f"saved {path.with_suffix('.svg')}")
    return measured


def _progress(name: str, rows: Iterable[T], total: int) -> Iterable[T]:
    """Yields the rows, with a progress bar on stderr if that is a terminal."""
    console = rich.console.Console(stderr=True)
    return rich.progress.track(
        rows, name, total=total, console=console, transient=True, disable=not is_live(console)
    )


def _check(benchmark: ModuleType, rows: Sequence[dict[str, Any]]) -> None:
    """Exits with code 1 if any row misses its limits, after a sentence about each."""
    sys.stdout.flush()
    if failures := benchmark.failures(rows):
        for failure in failures:
            note(f"mpjax: {failure}")
        raise typer.Exit(1)

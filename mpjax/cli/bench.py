"""`mpjax bench`: measures kernels and whole models on this GPU, and the bounds of their speed.

The commands have one pattern: options give a sweep of cases, each measured row is saved at once,
and at the end there are a table, for some commands a plot, and a check of every result against
the reference.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
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
    SERVE_EPILOG,
    SUMS_EPILOG,
)
from mpjax.cli.compilation import CompilingCommand
from mpjax.cli.options import DeviceCount, Experts, ExpertsKind
from mpjax.cli.output import is_live, note

NAME = "bench"
WEIGHT_FORMATS = (
    "uint4:g128,uint8:g128,float8:g128,int8/int8,liquid4:g64/int8,int4:g128/int8,table4:g64,"
    "table3:g64,float8:gK/float8"
)
ROWS = "1,16,32,64,128,256,512,1024,4096"
SHAPES = "qwen3-8b"
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
    """The implementations of a product with packed weights that can be forced."""

    triton = "triton"
    mosaic = "mosaic"
    dequantize = "dequantize"
    xla = "xla"


Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER|FILE.json",
        show_default=False,
        help="Folder or file to which results are saved.",
    ),
]
Plot = Annotated[bool, typer.Option(help="Draw a plot (SVG) beside the results; needs matplotlib.")]


def _texts(metavar: str, help: str, show_default: bool = True) -> Any:
    """An option that takes several texts, separated by commas."""
    return typer.Option(metavar=f"{metavar},...", help=help, show_default=show_default)


@app.command("gemm", cls=CompilingCommand, epilog=GEMM_EPILOG)
def gemm_command(
    formats: Annotated[
        str, _texts("FORMAT", "Weight formats; by default the nine below.", show_default=False)
    ] = WEIGHT_FORMATS,
    rows: Annotated[str, _texts("M", "Numbers of rows of x.")] = ROWS,
    shapes: Annotated[
        str, _texts("NAME", "Models (qwen3-8b, llama3-70b), or single matrices (qwen3-8b.qkv).")
    ] = SHAPES,
    implementation: Annotated[
        Implementation | None,
        typer.Option(help="Force an implementation; by default the plan's.", show_default=False),
    ] = None,
    in_model: Annotated[
        bool,
        typer.Option(
            "--in-model",
            help="Leave out the work of a model's other kernels: x comes already rounded for "
            "formats with 8-bit activations, and the terms of splits of K are not added.",
        ),
    ] = False,
    rounded: Annotated[
        bool,
        typer.Option(
            "--rounded",
            help="Leave out only the rounding of x to 8 bits, which a norm or a gate does.",
        ),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option(
            "--experts",
            help="Measure the products of tokens with experts instead: of qwen3-30b-a3b and "
            "mixtral-8x7b (the default), and gpt-oss-20b. There is no plot.",
        ),
    ] = False,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure packed products against their floor and cuBLAS."""
    if experts:
        _measure_experts(formats, rows, shapes, output)
        return
    from mpjax.bench import gemm, tables
    from mpjax.kernels.gemm.shapes import named

    sweep = _checked(
        lambda: gemm.Sweep(
            named(_split(shapes)),
            _numbers("--rows", rows),
            _split(formats),
            None if implementation is None else implementation.value,
            in_model,
            rounded,
        )
    )
    measured, path = _measure("gemm", gemm, sweep, output)
    for shape in sweep.shapes:
        title = f"{shape.name}: K {shape.channels}, N {shape.outputs}"
        tables.show(
            title,
            gemm.HEADERS,
            [gemm.cells(row) for row in measured if row["shape"] == shape.name],
        )
    if plot:
        _draw("draw_gemm", measured, path.with_suffix(".svg"))
    _check(gemm, measured)


def _measure_experts(formats: str, rows: str, shapes: str, output: Path | None) -> None:
    """`mpjax bench gemm --experts`; options that were not given have the defaults of experts."""
    from mpjax.bench import experts, tables
    from mpjax.kernels.experts.shapes import named_mlps

    sweep = _checked(
        lambda: experts.Sweep(
            named_mlps(_split(EXPERT_SHAPES if shapes == SHAPES else shapes)),
            _numbers("--rows", EXPERT_ROWS if rows == ROWS else rows),
            _split(EXPERT_FORMATS if formats == WEIGHT_FORMATS else formats),
        )
    )
    measured, _ = _measure("experts", experts, sweep, output)
    for shape in sweep.shapes:
        title = (
            f"{shape.name}: {shape.per_token} of {shape.experts} experts, K {shape.channels}, "
            f"N {shape.outputs}"
        )
        found = [experts.cells(row) for row in measured if row["shape"] == shape.name]
        tables.show(title, experts.HEADERS, found)
    _check(experts, measured)


@app.command("attention", cls=CompilingCommand, epilog=ATTENTION_EPILOG)
def attention_command(
    formats: Annotated[str, _texts("FORMAT", "KV formats, or uncached.")] = "KV16,KV8,KV4",
    shapes: Annotated[
        str, _texts("SHAPE", "Shapes (b8-h32/8-d128-c32768), or sets (decode, ragged, prefill).")
    ] = "decode,prefill",
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure paged attention against its floor and cuDNN."""
    from mpjax.bench import attention, tables

    sweep = _checked(lambda: attention.Sweep(attention.named(_split(shapes)), _split(formats)))
    measured, path = _measure("attention", attention, sweep, output)
    tables.show("paged attention", attention.HEADERS, map(attention.cells, measured))
    if plot and any(row["queries"] == 1 for row in measured):
        _draw("draw_attention", measured, path.with_suffix(".svg"))
    _check(attention, measured)


@app.command("generate", cls=CompilingCommand, epilog=GENERATE_EPILOG)
def generate_command(
    precision: Annotated[
        str, _texts("W4A16KV8", "Precisions; `mpjax --help` explains them.")
    ] = "W4A16KV8",
    shapes: Annotated[
        str,
        _texts("NAME", "Models: qwen3-8b, llama3.1-8b, qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b."),
    ] = SHAPES,
    batch: Annotated[str, _texts("ROWS", "Numbers of rows that are decoded together.")] = "1",
    prompt_tokens: Annotated[
        str, _texts("TOKENS", "Numbers of tokens of each row's prompt.")
    ] = "2048",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each row.")] = 256,
    devices: Annotated[
        str, _texts("COUNT", "Numbers of devices among which the model is divided.")
    ] = "1",
    experts: Experts = ExpertsKind.divided,
    speculate: Annotated[
        str,
        _texts("K", "Also measure steps that verify K proposed tokens.", show_default=False),
    ] = "",
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="all",
            help="Number of the model's first layers that there are, where memory or time lacks "
            "for all: a layer's time does not depend on it.",
        ),
    ] = None,
    piece_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="all",
            help="Tokens of each row's prompt that are read at a time, where memory lacks for the "
            "activations of all.",
        ),
    ] = None,
    filled: Annotated[
        bool,
        typer.Option(
            "--filled",
            help="Read a prompt only in the first case of each precision, and fill the cache with "
            "random keys and values in the others, which is fast for long contexts.",
        ),
    ] = False,
    from_disk: Annotated[
        bool,
        typer.Option(
            "--from-disk",
            help="Write an AWQ checkpoint (5 GB) to a temporary folder and measure the time to "
            "load it; by default the weights are made on the GPU.",
        ),
    ] = False,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure tokens/s of a whole model against its roofline."""
    from mpjax.bench import generate, speculation, tables
    from mpjax.models.presets import published

    def sweep_of(name: str) -> generate.Sweep:
        decoder, config = published(name)
        if layers is not None and layers > config.num_layers:
            raise ValueError(f"layers is {layers}, and {name} has {config.num_layers}")
        config = dataclasses.replace(config, layers=config.layers[:layers])
        return generate.Sweep(
            _split(precision),
            _numbers("--batch", batch),
            _numbers("--prompt-tokens", prompt_tokens),
            new_tokens,
            from_disk,
            filled,
            config,
            decoder,
            _numbers("--devices", devices),
            _numbers("--speculate", speculate) if speculate else (),
            piece_tokens,
            experts.value,
        )

    sweeps = {name: _checked(functools.partial(sweep_of, name)) for name in _split(shapes)}
    everything = []
    for name, sweep in sweeps.items():
        file = "generate" if name == SHAPES else f"generate-{name}"
        file += "" if layers is None else f"-{layers}-layers"
        measured, path = _measure(file, generate, sweep, output)
        title = f"{name}'s shapes, random weights, {new_tokens} new tokens"
        title += "" if layers is None else f", {layers} layers"
        tables.show(title, generate.HEADERS, map(generate.cells, measured))
        if speculate:
            costs = [cells for row in measured for cells in speculation.rows(row)]
            tables.show("steps of speculation, over a step", speculation.HEADERS, costs)
        if plot:
            _draw("draw_generate", measured, path.with_suffix(".svg"))
        everything += measured
    _check(generate, everything)


class Shapes(enum.StrEnum):
    """Published shapes for random weights."""

    qwen3_8b = "qwen3-8b"
    llama3_8b = "llama3.1-8b"


@app.command("serve", cls=CompilingCommand, epilog=SERVE_EPILOG)
def serve_command(
    precision: Annotated[
        str, _texts("W4A16KV8", "Precisions; `mpjax --help` explains them.")
    ] = "W4A16KV8",
    shapes: Annotated[Shapes, typer.Option(help="The shape of the model.")] = Shapes.qwen3_8b,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 256,
    prompt_tokens: Annotated[
        str,
        typer.Option(metavar="LENGTHS", help="1024, 512-2048, or lognormal:MEAN:SIGMA:MOST."),
    ] = "1024",
    new_tokens: Annotated[
        str, typer.Option(metavar="LENGTHS", help="New tokens of each request.")
    ] = "512",
    lengths: options.LengthsFile = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, show_default="all at once", help="Requests per second, at random times."
        ),
    ] = None,
    shared_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens with which every prompt begins.")
    ] = 0,
    late_prompt: Annotated[
        int, typer.Option(min=0, help="Tokens of one more prompt, which comes when all decode.")
    ] = 0,
    slots: Annotated[int, typer.Option(min=1, help="The most requests at a time.")] = 256,
    chunk_tokens: options.ChunkTokens = 4096,
    max_gap: options.MaxGap = None,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps of a program.")] = 8,
    cache_memory: options.CacheMemory = None,
    share: Annotated[bool, typer.Option(help="Share the pages of equal beginnings.")] = True,
    ride: Annotated[
        bool, typer.Option(help="Let rows decode in the programs that read long prompts.")
    ] = False,
    speculate: options.Speculate = None,
    static: Annotated[
        int, typer.Option(min=0, help="Also measure static batches of so many requests.")
    ] = 0,
    engine: Annotated[bool, typer.Option(help="Measure an engine, not batches alone.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="How often it runs; the last counts.")] = 2,
    devices: DeviceCount = 1,
    trace: options.TraceFile = None,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure an engine under load: tokens/s, and their times."""
    from mpjax.atomic_write import require_writable
    from mpjax.bench import serve, tables
    from mpjax.bench.lengths import Lengths, read_file
    from mpjax.models import presets

    config = presets.QWEN3_8B if shapes == Shapes.qwen3_8b else presets.LLAMA3_1_8B
    sweep = _checked(
        lambda: serve.Sweep(
            _split(precision),
            serve.Load(
                requests,
                Lengths.parse(prompt_tokens),
                Lengths.parse(new_tokens),
                tuple(read_file(lengths)) if lengths else (),
                rate,
                shared_tokens,
                late_prompt,
            ),
            slots=slots,
            chunk_tokens=chunk_tokens,
            max_gap=max_gap,
            steps=steps,
            cache_memory=cache_memory,
            share_prefixes=share,
            ride=ride,
            speculate=options.parse_speculate(speculate),
            static=static,
            engine=engine,
            rounds=rounds,
            config=config,
            devices=devices,
            trace=trace,
        )
    )
    if trace is not None:
        require_writable(trace)
    title = f"{shapes.value}'s shapes, random weights, {requests} requests"
    measured, path = _measure("serve", serve, sweep, output)
    tables.show(title, serve.HEADERS, map(serve.cells, measured))
    if plot:
        _draw("draw_serve", measured, path.with_suffix(".svg"))
    _check(serve, measured)


@app.command("sums", cls=CompilingCommand, epilog=SUMS_EPILOG)
def sums_command(
    devices: Annotated[int, typer.Option(min=2, help="Number of devices.")] = 2,
    sizes: Annotated[str, _texts("KIB", "Sizes of a device's array, in KiB.")] = (
        "8,16,64,256,1024,4096,16384,65536"
    ),
    dtypes: Annotated[str, _texts("DTYPE", "Dtypes.")] = "bfloat16,float32",
    ways: Annotated[
        str, _texts("WAY", "Ways to add: psum, gather, exchange, scatter, peer, as below.")
    ] = "psum",
    options: Annotated[
        str,
        typer.Option(
            metavar="NAME=VALUE,...", help="XLA's options with which the chains are compiled."
        ),
    ] = "",
    output: Output = None,
) -> None:
    """Measure sums over devices, as a divided model has."""
    from mpjax.bench import sums, tables

    given = tuple(_compiler_option(text) for text in _split(options) if text)
    sweep = _checked(
        lambda: sums.Sweep(devices, _numbers("--sizes", sizes), _split(dtypes), _split(ways), given)
    )
    measured, _ = _measure("sums", sums, sweep, output)
    tables.show("sums over devices", sums.HEADERS, map(sums.cells, measured))
    _check(sums, measured)


def _compiler_option(text: str) -> tuple[str, bool | int | str]:
    """The name and the value of one of XLA's options, such as `xla_gpu_enable_pdl=false`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} has no =", param_hint="--options")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if value.isdecimal() else value


def _split(text: str) -> tuple[str, ...]:
    """Splits a text at its commas, and drops repeated parts."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = _split(text)
    if wrong := [part for part in parts if not part.isdecimal()]:
        raise typer.BadParameter(f"{wrong[0]!r} is not a number", param_hint=option)
    return tuple(map(int, parts))


def _checked(build: Callable[[], T]) -> T:
    """Calls `build`, and raises its ValueError as wrong usage of the options."""
    try:
        return build()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _measure(
    name: str, benchmark: ModuleType, sweep: Any, output: Path | None
) -> tuple[list[dict[str, Any]], Path]:
    """Measures a sweep; returns its rows and the file to which they were saved."""
    from mpjax.bench import measure

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
    return measured, path


def _progress(name: str, rows: Iterable[T], total: int) -> Iterable[T]:
    """Yields the rows, with a progress bar on stderr if that is a terminal."""
    console = rich.console.Console(stderr=True)
    return rich.progress.track(
        rows, name, total=total, console=console, transient=True, disable=not is_live(console)
    )


def _draw(function: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        note("no plot: matplotlib is missing (pip install matplotlib)")
        return
    from mpjax.bench import roofline

    getattr(roofline, function)(rows, path)
    note(f"saved {path}")


def _check(benchmark: ModuleType, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a sentence for each row that misses its gate, and then exits with code 1."""
    sys.stdout.flush()
    if failures := benchmark.failures(rows):
        for failure in failures:
            note(f"mpjax: {failure}")
        raise typer.Exit(1)

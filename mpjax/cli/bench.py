"""`mpjax bench`: measures kernels and whole models on this GPU, and the bounds of their speed.

There are four commands of one pattern: options give a sweep of cases, each measured row is saved
at once, and at the end there are a table, a plot and a check of every result against the reference.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import rich.console
import rich.progress
import typer

from mpjax.cli.compilation import CompilingCommand
from mpjax.cli.output import is_live, note

NAME = "bench"
WEIGHT_FORMATS = (
    "uint4:g128,uint8:g128,float8:g128,int8/int8,liquid4:g64/int8,int4:g128/int8,table4:g64,"
    "table3:g64,float8:gK/float8"
)
ROWS = "1,16,32,64,128,256,512,1024,4096"
T = TypeVar("T")
EPILOG = """\b
Examples:
  mpjax bench gemm --formats uint4:g128,uint8:g128 --rows 1,16,64
  mpjax bench attention --formats KV8,KV4
  mpjax bench generate --precision W4A16KV8 --batch 1,16
  mpjax bench serve --requests 256 --prompt-tokens 1024 --new-tokens 512

\b
A time is the sum of the kernels that a call runs on the GPU, measured by
CUPTI. Repeated calls read different copies, together larger than the L2
cache. Results are saved as JSON with the device, versions and commit: in
benchmarks/results of a checkout, else in the current folder. The exit code is
1 if the error of any result, against the reference, is above its gate.
"""
GEMM_EPILOG = """\b
Examples:
  mpjax bench gemm
  mpjax bench gemm --formats uint4:g128 --shapes qwen3-8b.gate_up --rows 1,16
  mpjax bench gemm --implementation dequantize --output dequantize.json
  mpjax bench gemm --formats liquid4:g64/int8 --rows 1,16 --in-model

\b
Measures x [M, K] times a packed weight [K, N], in bfloat16. Default formats:
uint4:g128 uint8:g128 float8:g128 int8/int8 liquid4:g64/int8 int4:g128/int8
table4:g64 table3:g64 float8:gK/float8.
  µs         one product, the median of five
  GB/s       bytes of the packed weight, x and the product, each counted once,
             over the time
  TFLOP/s    2 M K N operations over the time
  × floor    the time over the floor, in which an XLA reduction reads the
             same packed bytes, in the same run. Up to about 16 rows nothing
             is faster than 1; below 1.35 is good, below 1.15 very good
  speed-up   time of cuBLAS (jnp.dot in bfloat16) at the same shape over the
             time. With many rows operations limit, not bytes: 1 is good with
             16-bit activations, 1.5 and more with 8-bit ones
  error      mean error over mean magnitude, against the float32 reference on
             the same packed weight; the gate is 8e-3
  as         the implementation: triton or mosaic (fused kernels), dequantize
             (then cuBLAS), or xla

The plot needs pip install "mpjax[bench]". It has a line for each format, and its rooflines.
"""
ATTENTION_EPILOG = """\b
Examples:
  mpjax bench attention
  mpjax bench attention --shapes b8-h32/8-d128-c32768 --formats KV16,KV4
  mpjax bench attention --shapes ragged --formats KV8,KV4
  mpjax bench attention --shapes prefill --formats uncached,KV8,KV4

\b
Measures attention of new tokens over a full paged cache, in bfloat16. A shape
b8-h32/8-d128-c32768-q2048-l65536 has 8 sequences, 32 query heads and 8 KV
heads of 128 channels, and 32768 tokens in the cache of each sequence, of
which 2048 are new. Without q there is one new token. With l, the first
sequence has 65536 tokens; cuDNN is given all lengths then.
  TB/s       bytes of the cache over the time
  TFLOP/s    operations of the two products of each query, with the keys and
             with the values that it attends to, over the time
  × floor    the time over the floor, in which an XLA reduction reads the
             same bytes, in the same run. With one new token, 1.1 is good
  speed-up   time of cuDNN (jax.nn.dot_product_attention) on a contiguous
             16-bit cache over the time. With one new token, 8 and 4 bits
             should gain as much as they save in bytes; with many, operations
             limit, and 0.8 is good. Many tokens over a cache take cuDNN two
             calls, whose times are added
  append µs  time to quantise the new tokens and write them to the cache; a
             model does this and the rotation of the keys in one kernel
  error      mean error over mean magnitude, against the reference on the same
             cache, of the last 32 new tokens of each sequence; the gate is
             8e-3. Empty above 524288 tokens in all
The plot has the shapes with one new token: each format and its roofline.
The format "uncached" is a prompt from its first token on, which attends to
its own keys and values in 16 bits, as in a model, before they are quantised.
"""
GENERATE_EPILOG = """\b
Examples:
  mpjax bench generate
  mpjax bench generate --precision W16A16KV16,W4A16KV8 --batch 1,16,64
  mpjax bench generate --precision W4A16KV8,W4A16KV2 \\
      --prompt-tokens 1024,16384,131072 --filled
  mpjax bench generate --from-disk

\b
Measures greedy generation with random weights in the shapes of Qwen3-8B,
without stop tokens. The model has 40960 positions, or more if the longest
context needs them.
  context      tokens in the cache when decoding begins
  first token  wall time to read the prompts and draw the first new token;
               empty where the cache was filled (--filled)
  tokens/s     new tokens of all rows per second, from the time of a step
  step         wall time of a decoding step of all rows
  kernels      sum of the times of a step's kernels, launched one after the
               other; in a real step a kernel may start before the previous
               one ends. Empty where the cache was filled
  roofline     time to read all weights, and the cache with half of the new
               tokens in it, at the rate of an XLA reduction over 2 GB
  of it        roofline over step: no implementation exceeds 100 %, above 60 %
               is good
  peak memory  highest memory use so far, shown in the row that reached it
  check        mean difference, in nats, between the log-probabilities of the
               first row's new tokens and those of a pass over the whole text
               without a cache, by other kernels; the gate is 1, or 1.5 with a
               cache of two bits. Empty above 8192 tokens, and where the cache
               was filled, since there is no text then

\b
The plot shows several contexts as lines below their rooflines, one context as
bars. Compiling takes some ten seconds for each case, and as long again for
its prompt; --filled reads only one prompt for each precision.
"""

SERVE_EPILOG = """\b
Examples:
  mpjax bench serve --requests 256 --prompt-tokens 1024 --new-tokens 512
  mpjax bench serve --requests 512 --prompt-tokens lognormal:1024:0.8:4096 \\
      --new-tokens lognormal:512:0.8:4096 --static 64
  mpjax bench serve --requests 32 --prompt-tokens 4096 --shared-tokens 3072
  mpjax bench serve --requests 32 --new-tokens 1000 --late-prompt 32768
  mpjax bench serve --rate 8

\b
Runs requests through an engine, with random weights in a published shape and
random prompts, without stop tokens. The load runs --rounds times with other
prompts; the last is measured, and the others compile.
  tokens/s     new tokens of all requests, from the first arrival to the last
               token
  first token  time from a request's arrival to its first token, P50 and P99
  token        time of each further token of a request, P50 and P99
  longest gap  between two reports of new tokens of a request; up to --steps
               tokens come together
  shared       prompt tokens that were in the cache already
  preempted    how often a request made room for an older one
The JSON also has late_steps: programs before which the device was idle; up to
3 % of all `steps` are good. The roofline of a decoding step is in `mpjax
bench generate`. The exit code is 1 if tokens are missing, or if more than 15
programs were compiled.
"""

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
    ] = "qwen3-8b",
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
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure packed products against their floor and cuBLAS."""
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
    batch: Annotated[str, _texts("ROWS", "Numbers of rows that are decoded together.")] = "1",
    prompt_tokens: Annotated[
        str, _texts("TOKENS", "Numbers of tokens of each row's prompt.")
    ] = "2048",
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each row.")] = 256,
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
    from mpjax.bench import generate, tables

    sweep = _checked(
        lambda: generate.Sweep(
            _split(precision),
            _numbers("--batch", batch),
            _numbers("--prompt-tokens", prompt_tokens),
            new_tokens,
            from_disk,
            filled,
        )
    )
    measured, path = _measure("generate", generate, sweep, output)
    title = f"Qwen3-8B's shapes, random weights, {new_tokens} new tokens"
    tables.show(title, generate.HEADERS, map(generate.cells, measured))
    if plot:
        _draw("draw_generate", measured, path.with_suffix(".svg"))
    _check(generate, measured)


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
    lengths: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE.jsonl",
            help='Lengths from a file: {"prompt_tokens": 900, "new_tokens": 120} on each line.',
        ),
    ] = None,
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
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="The most prompt tokens between two decoding steps.")
    ] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Decoding steps of a program.")] = 8,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Bytes of the cache, or the share of free memory."),
    ] = None,
    share: Annotated[bool, typer.Option(help="Share the pages of equal beginnings.")] = True,
    static: Annotated[
        int, typer.Option(min=0, help="Also measure static batches of so many requests.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="How often the load runs.")] = 2,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure an engine under load: tokens/s, and the times of tokens."""
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
            steps=steps,
            cache_memory=cache_memory,
            share_prefixes=share,
            static=static,
            rounds=rounds,
            config=config,
        )
    )
    measured, path = _measure("serve", serve, sweep, output)
    title = f"{shapes.value}'s shapes, random weights, {requests} requests"
    tables.show(title, serve.HEADERS, map(serve.cells, measured))
    if plot:
        _draw("draw_serve", measured, path.with_suffix(".svg"))
    _check(serve, measured)


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
        note('no plot: matplotlib is missing (pip install "mpjax[bench]")')
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

"""`mpjax bench`: measures kernels and whole models on this GPU, and the bounds of their speed.

There are three commands of one pattern: options give a sweep of cases, each measured row is saved
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
    "uint4:g128,uint8:g128,float8:g128,int8/int8,liquid4:g64/int8,table4:g64,table3:g64,"
    "float8:gK/float8"
)
ROWS = "1,16,32,64,128,256,512,1024,4096"
T = TypeVar("T")
EPILOG = """\b
Examples:
  mpjax bench gemm --formats uint4:g128,uint8:g128 --rows 1,16,64
  mpjax bench attention --formats KV8,KV4
  mpjax bench generate --precision W4A16KV8 --batch 1,16

\b
Times are those of the kernels on the GPU, from CUPTI, every helper kernel
counted; what is read is larger than the L2 cache, or rotated past it. Results
are saved as JSON with the device, versions and commit: in benchmarks/results
of a checkout, else in the current folder. Exit code 1 if any result misses
the reference by more than its gate.
"""
GEMM_EPILOG = """\b
Examples:
  mpjax bench gemm
  mpjax bench gemm --formats uint4:g128 --shapes qwen3-8b.gate_up --rows 1,16
  mpjax bench gemm --implementation dequantize --output dequantize.json
  mpjax bench gemm --formats liquid4:g64/int8 --rows 1,16 --in-model

\b
x [M, K] times a packed weight [K, N], in bfloat16. Formats by default:
uint4:g128 uint8:g128 float8:g128 int8/int8 liquid4:g64/int8 table4:g64
table3:g64 float8:gK/float8.
  µs         one product, the median of five
  GB/s       packed weight, x and product, each once
  TFLOP/s    2 M K N operations
  × floor    µs over the time in which an XLA reduction reads the same packed
             bytes, in the same run: up to 16 rows or so nothing can be faster
             than 1, below 1.35 is good and below 1.15 very good
  speed-up   over cuBLAS (jnp.dot in bfloat16) at the same shape: with many
             rows the operations count, not the bytes, and 1 is good for
             16-bit activations, 1.5 and more for 8-bit ones
  error      mean error over mean magnitude against the float32 reference over
             the same packed weight; the gate is 8e-3
  as         what ran: triton (fused), dequantize (then cuBLAS), or xla

The plot, which needs pip install "mpjax[bench]", has each format's line below its rooflines.
"""
ATTENTION_EPILOG = """\b
Examples:
  mpjax bench attention
  mpjax bench attention --shapes b8-h32/8-d128-c32768 --formats KV16,KV4
  mpjax bench attention --shapes ragged --formats KV8,KV4
  mpjax bench attention --shapes prefill --formats uncached,KV8,KV4

\b
New tokens of each sequence over a full paged cache, in bfloat16: one where
the shape doesn't say how many, such as q2048 of the c32768 in the cache. One
that ends with l65536 has a first sequence of so many tokens, longer than the
others; there cuDNN is told all lengths.
  TB/s       bytes of the cache over the time
  TFLOP/s    two products of each query with what it sees
  × floor    over the time in which an XLA reduction reads the same bytes, in
             the same run: for one token, 1.1 is good
  speed-up   over cuDNN (jax.nn.dot_product_attention) on an unpaged 16-bit
             cache: for one token, 8 and 4 bits should gain what they save in
             bytes; for many, the operations count, and 0.8 is good. cuDNN
             computes tokens over a cache in two calls, whose times are added
  append µs  to quantise the new tokens and write them to the cache, which a
             model does with the rotation of keys, in one kernel
  error      mean error over mean magnitude against the reference over the
             same cache, up to 524288 tokens in all, the last 32 new tokens of
             each sequence; the gate is 8e-3
The plot has the shapes of one token, each format below its rooflines.
The format "uncached" is for prompts from their first token on: they attend to
themselves in 16 bits, as in a model, whatever is then written to the cache.
"""
GENERATE_EPILOG = """\b
Examples:
  mpjax bench generate
  mpjax bench generate --precision W16A16KV16,W4A16KV8 --batch 1,16,64
  mpjax bench generate --precision W4A16KV8,W4A16KV2 \\
      --prompt-tokens 1024,16384,131072 --filled
  mpjax bench generate --from-disk

\b
Qwen3-8B's shapes with random weights, greedy, without stop tokens. The model
has 40960 positions, and as many more as the longest context needs.
  context      tokens that are in the cache when decoding begins
  first token  wall time of reading the prompts and drawing from what comes
               out; empty where the cache was filled (--filled)
  step         wall time of one decoding step, all rows; tokens/s follow
  kernels      the sum of a step's kernels, one by one; in a step, the next
               one is launched early, and waits beside the last. Empty where
               the cache was filled
  roofline     the time to read all weights and the cache at half of the new
               tokens, at the rate of an XLA reduction over 2 GB
  of it        its share of the step: 100 % is the limit of any
               implementation, above 60 % is good
  peak memory  if this row set it: the allocator keeps only the highest
  check        log-probabilities of the first row's new tokens against those
               of one pass over the whole text, which uses other kernels and
               no cache; the gate is 1 nat on average, 1.5 with a cache of two
               bits. Empty where the cache was filled, for there is no
               such text, and above 8192 tokens

\b
Several contexts are drawn as lines below their rooflines, one as bars.
A case compiles for some ten seconds, and its prompt for as many again:
--filled reads one prompt for each precision, to check it, and no other.
"""

app = typer.Typer(
    help="Measure kernels and whole models, beside what this GPU could do.",
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
        help="Where results go: a folder, or the file itself.",
    ),
]
Plot = Annotated[bool, typer.Option(help="Draw a plot (SVG) beside the results; needs matplotlib.")]


def _texts(metavar: str, help: str, show_default: bool = True) -> Any:
    """An option that takes several texts, separated by commas."""
    return typer.Option(metavar=f"{metavar},...", help=help, show_default=show_default)


@app.command("gemm", cls=CompilingCommand, epilog=GEMM_EPILOG)
def gemm_command(
    formats: Annotated[
        str, _texts("FORMAT", "Weight formats; by default the eight below.", show_default=False)
    ] = WEIGHT_FORMATS,
    rows: Annotated[str, _texts("M", "Rows of x.")] = ROWS,
    shapes: Annotated[
        str, _texts("NAME", "Models, qwen3-8b or llama3-70b, or a matrix such as qwen3-8b.qkv.")
    ] = "qwen3-8b",
    implementation: Annotated[
        Implementation | None,
        typer.Option(help="Force one for the packed weights.", show_default=False),
    ] = None,
    in_model: Annotated[
        bool,
        typer.Option(
            "--in-model",
            help="Leave out what a model's other kernels do: x comes rounded to 8 bits where that "
            "is wanted, and splits of K are not added.",
        ),
    ] = False,
    rounded: Annotated[
        bool,
        typer.Option(
            "--rounded",
            help="Leave out rounding x to 8 bits alone, which a norm or a gate before does.",
        ),
    ] = False,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure products with packed weights, beside floor and cuBLAS."""
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
        str, _texts("NAME", "Any, such as b8-h32/8-d128-c32768, or decode, ragged or prefill.")
    ] = "decode,prefill",
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure paged attention, beside floor and cuDNN."""
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
        str, _texts("W4A16KV8", "Precisions, as `mpjax --help` explains them.")
    ] = "W4A16KV8",
    batch: Annotated[str, _texts("ROWS", "Rows that are decoded at a time.")] = "1",
    prompt_tokens: Annotated[
        str, _texts("TOKENS", "Tokens of each prompt: contexts to decode from.")
    ] = "2048",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 256,
    filled: Annotated[
        bool,
        typer.Option(
            "--filled",
            help="Read a prompt in the first case of each precision only, and in the others fill "
            "the cache with random keys and values: long contexts in no time.",
        ),
    ] = False,
    from_disk: Annotated[
        bool,
        typer.Option(
            "--from-disk",
            help="Write an AWQ checkpoint (5 GB) to a temporary folder and time loading it; "
            "otherwise the weights are made on the GPU.",
        ),
    ] = False,
    output: Output = None,
    plot: Plot = True,
) -> None:
    """Measure tokens/s of a whole model, beside its roofline."""
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

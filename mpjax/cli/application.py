"""The application of all commands: their order, their errors and their exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
import typer.core

import mpjax
from mpjax import disk
from mpjax.cli import (
    bench,
    chat,
    compilation,
    convert,
    environment,
    evaluate,
    export,
    generate,
    info,
    interrupts,
    output,
    tune,
)

BROKEN_PIPE = 141  # the code with which shells report a program that SIGPIPE has ended
EPILOG = """\b
Examples:
  mpjax generate "def fibonacci(n):"
  mpjax chat --model Qwen3-8B-AWQ --precision W4A16KV8
  mpjax convert Qwen3-8B Qwen3-8B-W4 --precision W4A16KV8
  mpjax export Qwen3-8B-W4 Qwen3-8B-W4-AWQ --format awq

\b
A precision says how the weights (W), activations (A) and the KV cache are
held: W4A16KV8. Beside A16, weights are W16, W8, W4 (integers), WNF4, WNF3,
WNF2 (normal float) or WFP8, in groups of input channels that share a scale:
W4g32, W4g64 and W4gK (one group) choose another size than the usual one, and
W4sym fixes the zero point. W8A8, W4A8 and WFP8AFP8 round the activations on
the fly. The cache is KV16, KV8, KV4 (integers) or KVfp8, or keys and values
apart, as in K8V4; KV4t is KV4 without the Hadamard transform of the keys; in
KV4c and KV2, each channel of the keys has scales of its own, over 128 tokens
(KV4cg32, KV4cg64: fewer), and the last tokens wait in 16 bits; in K4cV4c those
of the values have, too. KV8s has static scales of channels, from a calibration
(mpjax evaluate --calibrate). A16KV8 leaves the weights as they are in the
checkpoint.

\b
Compiled programs are kept in mpjax/compiled in XDG_CACHE_HOME or ~/.cache, up
to 2 GiB, so that the next command need not compile them; in the folder that
JAX_COMPILATION_CACHE_DIR names where it is set. MPJAX_COMPILATION_CACHE=0 is
--no-compilation-cache, MPJAX_DEBUG=1 is --traceback.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 broken pipe.
"""


class Commands(typer.core.TyperGroup):
    """The group of all commands, which reports expected errors as one sentence on stderr."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        """Parses the command line; for --help and --version, also writes their text."""
        try:
            return super().make_context(*arguments, **keywords)
        except BrokenPipeError:
            output.discard(sys.stdout)
            raise typer.Exit(BROKEN_PIPE) from None
        except OSError as error:
            output.note(f"mpjax: {error}")
            raise typer.Exit(1) from None

    def invoke(self, ctx: Any) -> Any:
        """Runs the chosen command, and turns expected errors into messages and exit codes."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, because a broken pipe can still be handled here
            return result
        except KeyboardInterrupt:
            if not sys.stderr.isatty():
                output.end_line()
            typer.echo(interrupts.message(), err=True, nl=False)
            raise typer.Exit(interrupts.INTERRUPTED) from None
        except BrokenPipeError:
            output.discard(sys.stdout)
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            message = _explain(error)
            if message is None or ctx.params.get("traceback"):
                raise
            output.note(f"mpjax: {message}")
            raise typer.Exit(1) from None


def _explain(error: Exception) -> str | None:
    """The message for an expected error; None for any other, which is shown with its traceback."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text and not isinstance(error, OSError):
        # XLA ran out of device memory, beyond the checks made beforehand, or of space on a disk.
        line = text.splitlines()[0]
        full = any(os.strerror(code) in line for code in disk.FULL)
        return f"a disk is full: {line}" if full else f"the device ran out of memory: {line}"
    # CheckpointError and UnsupportedError are ValueErrors, DeviceMemoryError is a MemoryError.
    if isinstance(error, (ValueError, OSError, MemoryError)):
        return text or type(error).__name__
    return None


app = typer.Typer(
    name="mpjax",
    cls=Commands,
    help="Mixed-precision LLM inference in JAX: generate, chat, convert and measure.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help is the same text in a terminal, a pipe and a test
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mpjax {mpjax.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", envvar="MPJAX_DEBUG", help="Show where an error came from."),
    ] = False,
    compilation_cache: Annotated[
        bool,
        typer.Option(
            "--compilation-cache/--no-compilation-cache",
            envvar=compilation.VARIABLE,
            help="Keep compiled programs for the next command.",
        ),
    ] = True,
) -> None:
    pass


for _module in (generate, chat, convert, export, info, evaluate, tune, environment):
    # Programs compiled for tuning are run once, and would push others out of the cache.
    _cls = typer.core.TyperCommand if _module is tune else compilation.CompilingCommand
    app.command(_module.NAME, cls=_cls, epilog=_module.EPILOG)(_module.command)
app.add_typer(bench.app, name=bench.NAME)


def main() -> None:
    """Runs the command line of this process and exits."""
    output.prepare_streams()
    app(prog_name="mpjax")

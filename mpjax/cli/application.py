"""The command-line application: the order of commands, error messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
import typer.core

import mpjax
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
    quantize,
    serve,
    train_drafter,
    tune,
)
from mpjax.files import disk

BROKEN_PIPE = 141  # the exit code of shells for a program killed by SIGPIPE
EPILOG = """\b
Examples:
  mpjax generate "def fibonacci(n):"
  mpjax chat --model Qwen3-8B-AWQ --precision W4A16KV8
  mpjax convert Qwen3-8B Qwen3-8B-W4 --precision W4A16KV8
  mpjax quantize Qwen3-8B Qwen3-8B-W4 --precision W4A16KV8 --text book.txt
  mpjax export Qwen3-8B-W4 Qwen3-8B-W4-AWQ --format awq

\b
A precision, such as W4A16KV8, names the formats of the weights (W), the
activations (A) and the KV cache:
  W16, W8, W4      weights in 16 bits, or integers of 8 or 4 bits
  WNF4 WNF3 WNF2   normal float of 4, 3 or 2 bits
  WFP8, WMXFP4     float8 (e4m3), and float4 (e2m1) in groups of 32
  WM8, WM4         integers with a float minimum in groups of 32, of GGUF files
                   and HQQ
  W4g32, W4gK      32 input channels, or all, share a scale (W4 alone: 128)
  W4sym            integers with a fixed zero point in the middle
  A16              activations in 16 bits; A32 is a model in float32
  W8A8, W4A8       activations rounded to int8 in each product
  WFP8AFP8         activations rounded to float8 in each product
  W4Ax, W4Ax16     activations rounded to 4 bits in blocks of 128 channels, and
                   to 8 in one of 8 blocks, or of 16; W4A4: in none. A text
                   chooses the blocks: mpjax quantize
  A16KV8           no W part: the weights keep the checkpoint's format
  KV16, KV8, KV4   keys and values in 16 bits, or integers of 8 or 4 bits
                   with a scale for each token and head; K8V4: keys 8, values 4
  KVfp8            float8 (e4m3), with a scale for each head
  KV4t             KV4 without the Hadamard transform of the keys
  KV4c, KV2        4 or 2 bits; keys have a scale for each channel, over 128
                   tokens (KV4cg32, KV4cg64: 32, 64), and the last tokens stay
                   in 16 bits; K4cV4c: values have such scales too
  KV8s             8 bits with a static scale for each channel, measured by
                   mpjax convert --calibrate or mpjax evaluate --calibrate
  H8, E8           behind KV…: the head and the embedding in 8 bits, with a
                   scale for each token; a tied table is both
docs/precision.md in the repository has the accuracy and the memory of each.

\b
Compiled programs are kept for the next command, up to 2 GiB, in
mpjax/compiled in XDG_CACHE_HOME or ~/.cache; JAX_COMPILATION_CACHE_DIR names
another folder. MPJAX_COMPILATION_CACHE=0 is --no-compilation-cache,
MPJAX_DEBUG=1 is --traceback.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 broken pipe.
"""


WITH_POSITIONS = tuple(one.NAME for one in (generate, chat, serve, convert, evaluate))
# Phrases about arguments in the library's messages → phrases about the command's options.
IN_SHELL_WORDS = {
    "replace it with overwrite=True": "replace it with --overwrite",
    "export with format='plain'": "export with --format plain",
    "load the model with a precision": "quantise it with --precision,",
    "load the model with dtype='bfloat16'": "compute in --dtype bfloat16",
}


class Commands(typer.core.TyperGroup):
    """The group of all commands. Expected errors are reported as one sentence on stderr."""

    def make_context(self, *arguments: Any, **keywords: Any) -> Any:
        """Parses the command line; --help and --version are also written here."""
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
            sys.stdout.flush()  # flushed here, where a broken pipe can still be handled
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
            command = self.commands.get(ctx.invoked_subcommand)
            output.note(f"mpjax: {_in_shell_words(message, command)}")
            raise typer.Exit(1) from None


def _in_shell_words(message: str, command: Any) -> str:
    """A message of the library with argument names replaced by a command's options."""
    if command is None:
        return message
    message = message.replace(", or load the draft with max_positions", "")  # no option for it
    if command.name in WITH_POSITIONS:
        message = message.replace(
            "load the model with max_positions", "give more with --max-positions"
        )
    if command.name in (export.NAME, convert.NAME, quantize.NAME):
        for said, meant in IN_SHELL_WORDS.items():
            message = message.replace(said, meant)
    # Many messages begin with the argument's name and the value that was found.
    options = {p.name: p.opts[0] for p in command.params if p.opts[0].startswith("--")}
    options["bits"] = options.get("budget", "bits")
    argument, _, rest = message.partition(" ")
    is_about_it = argument in options and rest.startswith(("is ", "has "))
    return f"{options[argument]} {rest}" if is_about_it else message


def _explain(error: Exception) -> str | None:
    """The message for an expected error; None for an error to be shown with its traceback."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text and not isinstance(error, OSError):
        # XLA ran out of device memory despite the checks beforehand, or a disk is full.
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
    help="Mixed-precision LLM inference in JAX: generate, chat, quantise and measure.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help is the same in a terminal, a pipe and a test
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
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", envvar="MPJAX_DEBUG", help="Show the Python traceback of an error."
        ),
    ] = False,
    compilation_cache: Annotated[
        bool,
        typer.Option(
            "--compilation-cache/--no-compilation-cache",
            envvar=compilation.VARIABLE,
            help="Keep compiled programs on disk for the next command.",
        ),
    ] = True,
) -> None:
    pass


for _module in (
    *(generate, chat, serve, convert, quantize, export, train_drafter),
    *(info, evaluate, tune, environment),
):
    # Tuning's programs run once, and would evict others from the compilation cache.
    _cls = typer.core.TyperCommand if _module is tune else compilation.CompilingCommand
    app.command(_module.NAME, cls=_cls, epilog=_module.EPILOG)(_module.command)
app.add_typer(bench.app, name=bench.NAME)


def main() -> None:
    """Runs the command line of this process, then exits."""
    output.prepare_streams()
    app(prog_name="mpjax")

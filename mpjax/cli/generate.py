"""`mpjax generate`: completes one prompt on stdout as it comes."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import options

if TYPE_CHECKING:
    from mpjax.generation import Generation

NAME = "generate"
EPILOG = """\b
Examples:
  mpjax generate "def fibonacci(n):" --max-new-tokens 64
  mpjax generate "class Stack:" --precision W4A16KV8 --stop "class "
  mpjax generate --temperature 0.8 --top-p 0.95 --seed 7 "import "
  git diff | mpjax generate - --model Qwen3-8B-AWQ

The completion alone goes to stdout, so it can be piped. A line on stderr then tells how fast it
was. So that compiling isn't in these figures, the beginning is generated once before.
"""


def command(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; - reads it from stdin.", show_default=False),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Read the prompt from a file (UTF-8)."),
    ] = None,
    model: options.Model = None,
    precision: options.PrecisionText = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many tokens.")] = 128,
    min_new_tokens: Annotated[
        int, typer.Option(min=0, help="Hold back stop tokens until there are so many tokens.")
    ] = 0,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    dtype: options.ComputeDtype = None,
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt first.")] = False,
) -> None:
    """Continue a prompt, on stdout, as the text comes."""
    text = options.read_prompt(prompt, prompt_file)
    sampling = options.sampling_options(temperature, top_k, top_p, min_p, repetition_penalty)
    lm = options.load(model, precision, dtype)

    import mpjax

    def pieces() -> Any:
        return mpjax.stream(
            lm,
            text,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            sampling=sampling,
            stop=stop or (),
            seed=seed,
        )

    # The same draws as below, so that the second piece comes out of the decoding loop if any does.
    begin = time.perf_counter()
    beginning = pieces()
    for _ in itertools.islice(beginning, 2):
        pass
    beginning.close()
    compiling = time.perf_counter() - begin

    if echo:
        sys.stdout.write(text)
    generation = _write(pieces())
    if sys.stdout.isatty():
        typer.echo()
    typer.echo(_summary(generation, compiling), err=True)


def _write(pieces: Any) -> Generation:
    """Writes pieces of text to stdout as they come; returns what the generator returns."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value
        # Not typer.echo, which takes what looks like a terminal's escape codes out of the text.
        sys.stdout.write(piece)
        sys.stdout.flush()


def _summary(generation: Generation, compiling: float) -> str:
    [prompt], [tokens] = generation.prompt_tokens, generation.tokens
    line = (
        f"{prompt} prompt tokens, {len(tokens)} new; first token after "
        f"{generation.prefill_seconds:.3f} s"
    )
    if len(tokens) > 1:
        line += f", then {generation.tokens_per_second:,.1f} tokens/s"
    return f"{line} (compiling and a first try took {compiling:.1f} s before that)"

"""`mpjax generate`: completes one prompt, written to stdout as it comes, or many in batches."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import batch, options, output
from mpjax.cli.requests import Request, gather
from mpjax.cli.unfinished import Unfinished, job_name

if TYPE_CHECKING:
    from mpjax.generation import Generation
    from mpjax.language_model import LanguageModel

NAME = "generate"
HEADER_LENGTH = 60
EPILOG = """\b
Examples:
  mpjax generate "def fibonacci(n):" --max-new-tokens 64
  mpjax generate "class Stack:" --precision W4A16KV8 --stop "class "
  mpjax generate --temperature 0.8 --top-p 0.95 --seed 7 "import "
  git diff | mpjax generate - --model Qwen3-8B-AWQ --speculate ngram:4:3
  mpjax generate "def f(x):" "import os" --json
  mpjax generate --input prompts.jsonl --output results.jsonl

\b
The completion of a single prompt is written to stdout as it is generated,
and nothing else, so that it can be piped. Then a line on stderr gives the
speed. The beginning of the text is generated once before (the warm-up), so
that the speed does not include compilation.

\b
Several prompts are generated together, and each completion is written below
a header. A line of --input is a prompt: an object such as
  {"prompt": "def f(x):"}
  {"id": "q1", "messages": [{"role": "user", "content": "Why?"}], "seed": 7}
"id", "max_new_tokens" and "seed" are optional, and override the options.

\b
With --input, --output or --json, results are JSON Lines in the order of the
prompts, and stdout has nothing else. The keys of a result:
  id             the "id" of the line, else the number of the line or prompt
  text           the completion
  finish_reason  stop (a stop token or --stop) or length (--max-new-tokens)
  prompt_tokens  number of tokens of the prompt
  tokens         ids of the new tokens
  logprobs       natural logarithm of each new token's probability
The --output file is written when all results are there; a file that is there
already is refused, unless --overwrite lets it be replaced. Until then results
are kept in a hidden file beside it: if the command is interrupted, the same
command goes on where it was, and another one is refused without --overwrite.
"""


def command(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to continue. A single - reads a text from stdin.", show_default=False
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Read a prompt from a text file (UTF-8)."),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Read prompts from a JSON Lines file, or from stdin with -."
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            dir_okay=False,
            metavar="FILE.jsonl",
            help="Write results to a JSON Lines file, or to stdout with -.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file of --output, if there is one.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print results as JSON Lines to stdout.")
    ] = False,
    model: options.Model = None,
    precision: options.PrecisionText = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most new tokens.")] = 128,
    min_new_tokens: Annotated[
        int, typer.Option(min=0, help="Number of new tokens before which nothing ends the text.")
    ] = 0,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="Seed of the random draws. The first prompt has this seed, the next one the next.",
        ),
    ] = 0,
    stop: options.Stop = None,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    experts: options.Experts = options.ExpertsKind.divided,
    speculate: options.Speculate = None,
    batch_size: Annotated[
        int, typer.Option("--batch", min=1, help="The most prompts to generate at a time.")
    ] = 64,
    echo: Annotated[
        bool, typer.Option("--echo", help="Write the prompt before its completion.")
    ] = False,
) -> None:
    """Complete prompts: one as the text comes, or many together."""
    as_json = json or input is not None or output_file is not None
    if as_json and echo:
        raise typer.BadParameter(
            "results in JSON don't contain the prompt, only its id: leave --echo out",
            param_hint="--echo",
        )
    if str(output_file) == "-":
        output_file = None
    if json and output_file is not None:
        raise typer.BadParameter(
            "--json prints results to stdout, and --output writes them to a file: give one of them",
            param_hint="--json",
        )
    if output_file is not None:
        _check_output(output_file, input, overwrite=overwrite)
    requests = gather(prompt or [], prompt_file, input, max_new_tokens, seed)
    if few := [one for one in requests if one.max_new_tokens < min_new_tokens]:
        raise typer.BadParameter(
            f"{few[0].place} asks for at most {few[0].max_new_tokens} new tokens",
            param_hint="--min-new-tokens",
        )
    is_one = len(requests) == 1 and not as_json
    given = options.sampling_options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens or None,
    )
    lm = options.load(model, precision, dtype, max_positions, devices, experts)
    proposer = options.parse_speculate(speculate)
    sampling = options.choose_sampling(lm, given)
    common: dict[str, Any] = {"sampling": sampling, "stop": stop or ()}

    import mpjax

    if is_one:
        text = str(requests[0].prompt)
        settings = {"max_new_tokens": max_new_tokens, "seed": seed, "speculate": proposer, **common}
        _show_one(lambda: mpjax.stream(lm, text, **settings), text if echo else "")
        return
    begin = time.perf_counter()
    engine = {"slots": batch_size, "speculate": proposer}
    if output_file is not None:
        made = _complete_to_file(
            lm, requests, engine, common, output_file, speculate=speculate, overwrite=overwrite
        )
    else:
        made = batch.complete(lm, requests, engine, common)
        if as_json:
            for result in made:
                output.print_json(result, indent=None)
        else:
            _show_several(requests, made, echo)
    output.note(batch.summary(made, begin))


def _complete_to_file(
    lm: LanguageModel,
    requests: Sequence[Request],
    engine: Mapping[str, Any],
    options: Mapping[str, Any],
    file: Path,
    *,
    speculate: str | None,
    overwrite: bool,
) -> list[dict[str, Any]]:
    """Generates results and writes them to a file when all are there.

    After an interruption, the same command goes on with the results that it had.

    speculate: the option, since rows that are drawn at random have other tokens with a draft model.
    overwrite: whether the file, and kept results of another command, may be replaced.

    Returns the results of this run, without those that an earlier one had.
    """
    from mpjax.atomic_write import atomic_write, is_special

    if is_special(file.resolve()):
        results = batch.complete(lm, requests, engine, options)
        atomic_write(file, _as_lines(results))
        return results
    asked = [dataclasses.replace(request, place="") for request in requests]
    model = str(lm.source.resolve()), lm.precision, lm.config.dtype
    kept = Unfinished(file, job_name(model, asked, options, speculate), discards=overwrite)
    try:
        # Another process may have written the file while the model was loaded.
        _require_new(file, overwrite=overwrite)
        if kept.results:
            output.note(f"results kept of an earlier run: {len(kept.results)}; going on with them")
        results = batch.complete(lm, requests, engine, options, kept)
        atomic_write(file, _as_lines(results))
    except BaseException:
        kept.close(is_done=False)
        raise
    kept.close(is_done=True)
    return [result for index, result in enumerate(results) if index not in kept.results]


def _as_lines(results: Sequence[Mapping[str, Any]]) -> str:
    return "".join(output.to_json(result) + "\n" for result in results)


def _check_output(file: Path, input: Path | None, *, overwrite: bool) -> None:
    """Raises, before anything is generated, if results could not or may not be written to `file`.

    overwrite: whether a file with anything in it may be replaced.
    """
    from mpjax.atomic_write import require_writable

    if input is not None and file.exists() and input.exists() and file.samefile(input):
        raise typer.BadParameter(
            f"{file} is also --input: choose another file", param_hint="--output"
        )
    _require_new(file, overwrite=overwrite)
    require_writable(file)


def _require_new(file: Path, *, overwrite: bool) -> None:
    """Raises for a file with anything in it that may not be replaced."""
    if not overwrite and file.is_file() and file.stat().st_size:
        raise typer.BadParameter(
            f"{file} is there already: choose another file, or replace it with --overwrite",
            param_hint="--output",
        )


def _show_one(pieces: Callable[[], Generator[str, None, Generation]], prompt: str) -> None:
    """Writes a prompt and pieces of text to stdout as they come, and their speed to stderr.

    pieces: begins to generate, always with the same draws; it is called twice.
    """
    # The warm-up. Two pieces run both prefill and decoding loop, if the generation has two pieces.
    begin = time.perf_counter()
    beginning = pieces()
    with output.status("Compiling"):
        for _ in itertools.islice(beginning, 2):
            pass
    beginning.close()
    warm_up = time.perf_counter() - begin

    output.write(prompt)
    generation = _write(pieces())
    output.end_line()
    output.note(_summary(generation, warm_up))


def _write(pieces: Generator[str, None, Generation]) -> Generation:
    """Writes pieces of text to stdout as they come, and returns the generator's result."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value
        output.write(piece)


def _summary(generation: Generation, warm_up: float) -> str:
    [prompt], [tokens] = generation.prompt_tokens, generation.tokens
    line = (
        f"{prompt} prompt tokens, {len(tokens)} new: first after {generation.prefill_seconds:.3f} s"
    )
    if len(tokens) > 1:
        line += f", {generation.tokens_per_second:,.1f} tokens/s"
    if generation.speculation is not None:
        line += f", {generation.speculation}"
    return f"{line} (warm-up {warm_up:.1f} s)"


def _show_several(
    requests: Sequence[Request], results: Sequence[Mapping[str, Any]], echo: bool
) -> None:
    """Writes each completion below a header with the start of its prompt, as `head` does."""
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        prompt = str(request.prompt)
        first, *others = prompt.strip().splitlines() or [""]
        cut = others or len(first) > HEADER_LENGTH
        header = first[:HEADER_LENGTH] + ("..." if cut else "")
        text = (prompt if echo else "") + result["text"]
        output.write(("\n" if index else "") + f"==> {header} <==\n")
        output.write(text if text.endswith("\n") else text + "\n")

"""`mpjax generate`: completes one prompt, streamed to stdout, or many in batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import batch, options, output
from mpjax.cli.requests import Request, gather, require_new_tokens
from mpjax.cli.unfinished import Unfinished, job_name

if TYPE_CHECKING:
    from mpjax.engine.call import Generation
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
speed. The seconds until the first token include those of compiling, and the
tokens per second do not.

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


Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        help="Texts to continue. A single - reads a text from stdin.", show_default=False
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Read a prompt from a text file (UTF-8)."),
]
Input = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl", help="Read prompts from a JSON Lines file, or from stdin with -."
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        dir_okay=False,
        metavar="FILE.jsonl",
        help="Write results to a JSON Lines file, or to stdout with -.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the file of --output, if there is one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print results as JSON Lines to stdout.")]
MinNewTokens = Annotated[
    int, typer.Option(min=0, help="Number of new tokens before which nothing ends the text.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        max=2**32 - 1,
        help="Seed of the random draws. The first prompt has this seed, the next one the next.",
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch", min=1, help="The most prompts to generate at a time.")
]
Echo = Annotated[bool, typer.Option("--echo", help="Write the prompt before its completion.")]


def command(
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    input: Input = None,
    output_file: OutputFile = None,
    overwrite: Overwrite = False,
    json: Json = False,
    model: options.Model = None,
    precision: options.PrecisionText = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most new tokens.")] = 128,
    min_new_tokens: MinNewTokens = 0,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Seed = 0,
    stop: options.Stop = None,
    dtype: options.ComputeDtype = None,
    max_positions: options.MaxPositions = None,
    devices: options.DeviceCount = 1,
    experts: options.Experts = options.ExpertsKind.divided,
    speculate: options.Speculate = None,
    adapter: options.Adapter = None,
    batch_size: BatchSize = 64,
    echo: Echo = False,
) -> None:
    """Complete prompts: one as the text comes, or many together."""
    as_json = json or input is not None or output_file is not None
    output_file = _output(output_file, as_json=as_json, json=json, echo=echo)
    _check_output(output_file, input, overwrite=overwrite)
    requests = gather(prompt or [], prompt_file, input, max_new_tokens, seed)
    with options.wrong_usage("--min-new-tokens"):
        require_new_tokens(requests, min_new_tokens)
    given = options.sampling_options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        min_new_tokens=min_new_tokens or None,
    )
    adapters = options.parse_adapters([adapter])
    reading = {"adapters": adapters, **options.head_options(speculate)}
    lm = options.load(model, precision, dtype, max_positions, devices, experts, **reading)
    engine = {"slots": batch_size, "speculate": options.parse_speculate(speculate)}
    common: dict[str, Any] = {"sampling": options.choose_sampling(lm, given), "stop": stop or ()}
    common["adapter"] = next(iter(adapters), None)
    if len(requests) == 1 and not as_json:
        import mpjax

        text = str(requests[0].prompt)
        common |= {"max_new_tokens": max_new_tokens, "seed": seed, "speculate": engine["speculate"]}
        _show_one(mpjax.stream(lm, text, **common), text if echo else "")
        return
    begin = time.perf_counter()
    if output_file is None:
        made = batch.complete(lm, requests, engine, common)
        _show_several(requests, made, as_json=as_json, echo=echo)
    else:
        made = _complete_to_file(
            lm,
            requests,
            engine,
            common,
            output_file,
            beside=(speculate, adapter),
            overwrite=overwrite,
        )
    output.note(batch.summary(made, begin))


def _output(file: Path | None, *, as_json: bool, json: bool, echo: bool) -> Path | None:
    """The file of results; None for stdout. Raises BadParameter for contradicting options."""
    if as_json and echo:
        raise typer.BadParameter(
            "results in JSON don't contain the prompt, only its id: leave --echo out",
            param_hint="--echo",
        )
    file = None if str(file) == "-" else file
    if json and file is not None:
        raise typer.BadParameter(
            "--json prints results to stdout, and --output writes them to a file: give one of them",
            param_hint="--json",
        )
    return file


def _complete_to_file(
    lm: LanguageModel,
    requests: Sequence[Request],
    engine: Mapping[str, Any],
    options: Mapping[str, Any],
    file: Path,
    *,
    beside: tuple[str | None, ...],
    overwrite: bool,
) -> list[dict[str, Any]]:
    """Generates results and writes them to a file once all are complete.

    After an interruption, the same command resumes with the results that it had.

    beside: further options that change results: --speculate (sampled tokens differ with a draft
        model) and --adapter (with the adapter's folder).
    overwrite: whether the file, and kept results of another command, may be replaced.

    Returns the results of this run, without those of an earlier one.
    """
    from mpjax.files.atomic_write import atomic_write, is_special

    if is_special(file.resolve()):
        results = batch.complete(lm, requests, engine, options)
        atomic_write(file, _as_lines(results))
        return results
    asked = [dataclasses.replace(request, place="") for request in requests]
    model = str(lm.source.resolve()), lm.precision, lm.config.dtype
    kept = Unfinished(file, job_name(model, asked, options, *beside), discards=overwrite)
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


def _check_output(file: Path | None, input: Path | None, *, overwrite: bool) -> None:
    """Raises an error, before the generation, if `file` can't be or may not be written.

    file: None for stdout. overwrite: whether a file with content may be replaced.
    """
    from mpjax.files.atomic_write import require_writable

    if file is None:
        return
    if input is not None and file.exists() and input.exists() and file.samefile(input):
        raise typer.BadParameter(
            f"{file} is also --input: choose another file", param_hint="--output"
        )
    _require_new(file, overwrite=overwrite)
    require_writable(file)


def _require_new(file: Path, *, overwrite: bool) -> None:
    """Raises BadParameter for a file with content that may not be replaced."""
    if not overwrite and file.is_file() and file.stat().st_size:
        raise typer.BadParameter(
            f"{file} is there already: choose another file, or replace it with --overwrite",
            param_hint="--output",
        )


def _show_one(pieces: Generator[str, None, Generation], prompt: str) -> None:
    """Streams a prompt and its completion to stdout, then writes the speed to stderr."""
    with output.status("Compiling"):
        piece, generation = _next(pieces)
    output.write(prompt)
    while generation is None:
        output.write(piece)
        piece, generation = _next(pieces)
    output.end_line()
    output.note(_summary(generation))


def _next(pieces: Generator[str, None, Generation]) -> tuple[str, Generation | None]:
    """The next piece of text and None; at the end, an empty piece and the generator's result."""
    try:
        return next(pieces), None
    except StopIteration as end:
        return "", end.value


def _summary(generation: Generation) -> str:
    [prompt], [tokens] = generation.prompt_tokens, generation.tokens
    seconds = generation.prefill_seconds
    line = f"{prompt} prompt tokens, {len(tokens)} new: first after {seconds:.1f} s with compiling"
    if len(tokens) > 1:
        line += f", {generation.tokens_per_second:,.1f} tokens/s"
    if generation.speculation is not None:
        line += f", {generation.speculation}"
    return line


def _show_several(
    requests: Sequence[Request], results: Sequence[Mapping[str, Any]], *, as_json: bool, echo: bool
) -> None:
    """Prints each result as JSON, or as text below a header with the start of its prompt."""
    if as_json:
        for result in results:
            output.print_json(result, indent=None)
        return
    for index, (request, result) in enumerate(zip(requests, results, strict=True)):
        prompt = str(request.prompt)
        first, *others = prompt.strip().splitlines() or [""]
        cut = others or len(first) > HEADER_LENGTH
        header = first[:HEADER_LENGTH] + ("..." if cut else "")
        text = (prompt if echo else "") + result["text"]
        output.write(("\n" if index else "") + f"==> {header} <==\n")
        output.write(text if text.endswith("\n") else text + "\n")

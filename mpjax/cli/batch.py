"""Completes many prompts of `mpjax generate` with an engine."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress

from mpjax.cli.output import is_live, note
from mpjax.cli.requests import Request, count_tokens
from mpjax.cli.unfinished import Unfinished
from mpjax.generation.speculation.report import SpeculationReport

if TYPE_CHECKING:
    from mpjax.engine.handle import Handle
    from mpjax.language_model import LanguageModel


def complete(
    lm: LanguageModel,
    requests: Sequence[Request],
    engine: Mapping[str, Any],
    options: Mapping[str, Any],
    unfinished: Unfinished | None = None,
) -> list[dict[str, Any]]:
    """Generates a result for each request, in the order of requests.

    Shows a progress bar on stderr if stderr is a terminal, and afterwards the acceptance of
    speculation.

    engine: arguments of the Engine, such as `slots`, the most requests at a time.
    options: arguments of `Engine.submit` for all requests.
    unfinished: saves each result as it arrives, and holds the results of an earlier run.

    A result has the request's `id`, and `text`, `finish_reason`, `prompt_tokens` (their number),
    `tokens` and `logprobs`.

    Raises ValueError, before anything is generated, if the model can't take a request, and
    DeviceMemoryError if memory is lacking.
    """
    lengths = [count_tokens(lm, request) for request in requests]
    results = {} if unfinished is None else dict(unfinished.results)
    reports = []
    left = [index for index in range(len(requests)) if index not in results]
    columns = rich.progress.Progress.get_default_columns()
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        *columns,
        rich.progress.MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not is_live(console),
    ) as bar:
        task = bar.add_task("Compiling", total=len(requests), completed=len(results))
        most = max((lengths[i] + requests[i].max_new_tokens for i in left), default=0)
        engine = dict(engine) | {"max_tokens": most}
        for index, handle in _run(lm, requests, left, options, engine):
            bar.update(task, description="Generating", advance=handle is not None)
            if handle is None:
                continue
            results[index] = _result(requests[index], handle)
            reports.append(handle.speculation)
            if unfinished is not None:
                unfinished.add(index, results[index])
    if report := SpeculationReport.join(reports):
        note(str(report))
    return [results[index] for index in range(len(requests))]


def _run(
    lm: LanguageModel,
    requests: Sequence[Request],
    indices: Sequence[int],
    options: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> Iterator[tuple[int, Handle | None]]:
    """Generates the requests at `indices`; yields each event's index, and the handle at its end.

    engine: arguments of the Engine, whose slots and max_tokens are adjusted to the requests.
    """
    import mpjax
    from mpjax.generation.buckets import bucket_tokens

    if not indices:
        return
    most = min(bucket_tokens(engine["max_tokens"]), lm.config.max_position_embeddings)
    slots = min(engine["slots"], len(indices))
    # Text is not streamed, so decoding rows may wait until all prompts are prefilled.
    arguments = dict(engine) | {"slots": slots, "max_tokens": most, "max_gap": math.inf}
    with mpjax.Engine(lm, **arguments) as running:
        numbers = {}
        for index in indices:
            request = requests[index]
            handle = running.submit(
                request.prompt,
                max_new_tokens=request.max_new_tokens,
                seed=request.seed,
                **options,
            )
            numbers[handle] = index
        for event in running:
            index = numbers[event.handle]
            yield index, event.handle.result() if event.finish_reason else None


def _result(request: Request, handle: Handle) -> dict[str, Any]:
    return {
        "id": request.id,
        "text": handle.text,
        "finish_reason": handle.finish_reason,
        "prompt_tokens": len(handle.prompt),
        "tokens": handle.tokens,
        "logprobs": handle.logprobs,
    }


def summary(results: Sequence[Mapping[str, Any]], begin: float) -> str:
    """A line with the numbers of prompts and tokens, and the seconds since `begin`.

    results: generated in this run. begin: its `time.perf_counter()` at the start.
    """
    seconds = time.perf_counter() - begin
    read = sum(result["prompt_tokens"] for result in results)
    new = sum(len(result["tokens"]) for result in results)
    return (
        f"{len(results)} prompt{'' if len(results) == 1 else 's'}, {read:,} tokens, {new:,} new: "
        f"{seconds:.1f} s with compiling"
    )

"""Generates many prompts of `mpjax generate`, in groups of similar lengths."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress

from mpjax.cli.compilation import Shapes
from mpjax.cli.output import is_live
from mpjax.cli.requests import Request, count_tokens

if TYPE_CHECKING:
    from mpjax.language_model import LanguageModel


def complete(
    lm: LanguageModel, requests: Sequence[Request], size: int, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Generates a result for each request, in the order of requests.

    Shows a progress bar on stderr if that is a terminal.

    size: the most requests of a group. options: arguments of `mpjax.generate` for all requests.

    A result has the request's `id`, and `text`, `finish_reason`, `prompt_tokens` (their number),
    `tokens` and `logprobs` from its row of the Generation.

    Raises ValueError, before anything is generated, if the model can't take a request, and
    DeviceMemoryError if a group is too large.
    """
    lengths = [count_tokens(lm, request) for request in requests]
    results: dict[int, dict[str, Any]] = {}
    shapes = Shapes()
    columns = rich.progress.Progress.get_default_columns()
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        *columns,
        rich.progress.MofNCompleteColumn(),
        console=console,
        transient=True,
        disable=not is_live(console),
    ) as bar:
        task = bar.add_task("Compiling", total=len(requests))
        for group in _groups(requests, lengths, size):
            longest, new_tokens = lengths[group[0]], requests[group[0]].max_new_tokens
            new = shapes.is_new(len(group), longest, new_tokens)
            bar.update(task, description="Compiling" if new else "Generating")
            rows = _complete_group(lm, [requests[index] for index in group], options)
            results.update(zip(group, rows, strict=True))
            bar.advance(task, len(group))
    return [results[index] for index in range(len(requests))]


def _groups(
    requests: Sequence[Request], lengths: Sequence[int], size: int
) -> Iterator[tuple[int, ...]]:
    """Groups the indices of requests: equal numbers of new tokens, and similar prompt lengths.

    The largest groups come first, so that a lack of memory shows at once.
    """

    def room(index: int) -> int:
        return requests[index].max_new_tokens

    order = sorted(range(len(requests)), key=lambda index: (-room(index), -lengths[index]))
    for _, alike in itertools.groupby(order, room):
        yield from _batched(alike, size)


def _batched(indices: Iterator[int], size: int) -> Iterator[tuple[int, ...]]:
    """Splits indices into batches of `size`: itertools.batched, which is new in 3.12."""
    while batch := tuple(itertools.islice(indices, size)):
        yield batch


def _complete_group(
    lm: LanguageModel, group: Sequence[Request], options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    import mpjax
    from mpjax.memory import DeviceMemoryError

    try:
        generation = mpjax.generate(
            lm,
            [request.prompt for request in group],
            max_new_tokens=group[0].max_new_tokens,
            seeds=[request.seed for request in group],
            **options,
        )
    except DeviceMemoryError as error:
        raise DeviceMemoryError(f"{error}, or a smaller --batch than {len(group)}") from error
    for row, request in enumerate(group):
        yield {
            "id": request.id,
            "text": generation.text[row],
            "finish_reason": generation.finish_reasons[row],
            "prompt_tokens": generation.prompt_tokens[row],
            "tokens": generation.tokens[row],
            "logprobs": generation.logprobs[row],
        }


def summary(results: Sequence[Mapping[str, Any]], begin: float) -> str:
    """A line with the numbers of prompts and tokens, and the seconds since `begin`.

    begin: from `time.perf_counter()`.
    """
    seconds = time.perf_counter() - begin
    read = sum(result["prompt_tokens"] for result in results)
    new = sum(len(result["tokens"]) for result in results)
    return (
        f"{len(results)} prompt{'s' if len(results) > 1 else ''}, {read:,} tokens, {new:,} new: "
        f"{seconds:.1f} s with compiling"
    )

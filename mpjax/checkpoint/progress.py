"""Progress bars on stderr for loading, saving and quantising."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import rich.console
import rich.progress


@contextlib.contextmanager
def bytes_bar(
    action: str, folder: Path, progress: bool | None, total: int
) -> Iterator[Callable[[int], None]]:
    """Shows a bar of bytes while its block runs.

    Yields a function to call with the number of bytes just read or written. action: the verb before
    the bar, such as "Loading". total: all bytes. progress: whether to show the bar; None: if stderr
    is a terminal.
    """
    columns = rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn()
    with _bar(columns, f"{action} {folder.name}", progress, total) as advance:
        yield advance


@contextlib.contextmanager
def layers_bar(
    action: str, folder: Path, progress: bool | None, total: int, unit: str = "layer"
) -> Iterator[Callable[[int], None]]:
    """Shows a bar of layers, or of another unit, while its block runs; see `bytes_bar`."""
    columns = (
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with _bar(columns, f"{action} {folder.name}, {unit}", progress, total) as advance:
        yield advance


@contextlib.contextmanager
def _bar(
    columns: Sequence[rich.progress.ProgressColumn], text: str, progress: bool | None, total: int
) -> Iterator[Callable[[int], None]]:
    console = rich.console.Console(stderr=True, force_terminal=progress or None)
    shown = console.is_terminal if progress is None else progress
    first = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
    )
    with rich.progress.Progress(
        *first, *columns, console=console, transient=True, disable=not shown
    ) as bar:
        task = bar.add_task(text, total=total)
        yield lambda count: bar.advance(task, count)

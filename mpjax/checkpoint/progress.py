"""A progress bar on stderr for loading and saving."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import rich.console
import rich.progress


@contextlib.contextmanager
def bytes_bar(
    action: str, folder: Path, progress: bool | None, total: int
) -> Iterator[Callable[[int], None]]:
    """Shows a bar while its block runs.

    Yields a function that the block calls with the number of bytes just read or written. action:
    the verb before the bar, such as "Loading". total: bytes of the whole. progress: whether to show
    the bar; None: if stderr is a terminal.
    """
    console = rich.console.Console(stderr=True, force_terminal=progress or None)
    shown = console.is_terminal if progress is None else progress
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not shown
    ) as bar:
        task = bar.add_task(f"{action} {folder.name}", total=total)
        yield lambda count: bar.advance(task, count)

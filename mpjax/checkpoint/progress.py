"""The bar on stderr that shows how far loading is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import rich.console
import rich.progress


@contextlib.contextmanager
def loading_bar(
    folder: Path, progress: bool | None, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Shows a bar while its block runs, which calls what it gets with bytes that it has read.

    progress: whether to show it; None: where stderr is a terminal.
    total: bytes to read; where None, the bar only shows that something goes on, and for how long.
    """
    console = rich.console.Console(stderr=True, force_terminal=progress or None)
    shown = console.is_terminal if progress is None else progress
    known = rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn()
    columns = (
        rich.progress.TextColumn("Loading {task.description}"),
        rich.progress.BarColumn(),
        *((rich.progress.TimeElapsedColumn(),) if total is None else known),
    )
    with rich.progress.Progress(
        *columns, console=console, transient=True, disable=not shown
    ) as bar:
        task = bar.add_task(folder.name, total=total)
        yield lambda count: bar.advance(task, count)

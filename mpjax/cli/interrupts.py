"""Handles Ctrl-C on the command line: one line on stderr and the exit code 130 at any time.

Python's own handler raises KeyboardInterrupt wherever the program is. This is not enough: a C
module that is being imported turns it into an ImportError, and a callback, such as the garbage
collector's, drops it.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` is not imported, to handle Ctrl-C as soon as possible
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130  # the code with which shells report a program that SIGINT has ended
IMPORTING = "<frozen importlib._bootstrap>"  # the file of Python's frames that import modules
AGAIN_SECONDS = 0.01  # the time until a dropped interrupt is raised again
SHOW_CURSOR = "\x1b[?25h"  # shows the cursor, which a progress bar hides


def handle(run: Callable[[], None]) -> None:
    """Calls `run`, the whole command line of the process, and handles Ctrl-C during it.

    Ctrl-C raises KeyboardInterrupt in `run`. During an import, when no work can be lost, it ends
    the process at once.
    """
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _raise_again
    try:
        run()
    except KeyboardInterrupt:
        leave()
    finally:
        # While Python shuts down, nothing catches an exception, and all output is written.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def leave() -> NoReturn:
    """Writes the line about an interrupt, and ends the process at once with code 130."""
    os.write(2, message().encode())
    os._exit(INTERRUPTED)


def message() -> str:
    """The line for stderr; on a terminal it begins below the ^C that the terminal shows."""
    line = "mpjax: interrupted\n"
    return f"{SHOW_CURSOR}\n{line}" if os.isatty(2) else line


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _raise_again(dropped: Any) -> None:
    """Raises a KeyboardInterrupt that a callback has dropped again, a moment later."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(dropped)

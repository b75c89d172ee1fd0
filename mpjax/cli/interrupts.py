"""Handles Ctrl-C on the command line: always one line on stderr and exit code 130.

Python's own handler raises KeyboardInterrupt wherever the program is. That is not enough: while a C
module is imported, the exception becomes an ImportError, and in a callback, such as the garbage
collector's, it is dropped.
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

INTERRUPTED = 130  # the exit code of shells for a program killed by SIGINT
IMPORTING = "<frozen importlib._bootstrap>"  # the filename of the import system's frames
AGAIN_SECONDS = 0.01  # the time until a dropped interrupt is raised again
SHOW_CURSOR = "\x1b[?25h"  # shows the cursor, which a progress bar hides


def handle(run: Callable[[], None]) -> None:
    """Calls `run`, the whole command line of the process, and handles Ctrl-C during the call.

    Ctrl-C raises KeyboardInterrupt in `run`. During an import, when no work can be lost, Ctrl-C
    ends the process at once.
    """
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _raise_again
    try:
        run()
    except KeyboardInterrupt:
        leave()
    finally:
        # From here on Python shuts down: an exception would only print a traceback, and all output
        # is already written. So Ctrl-C exits at once.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def leave() -> NoReturn:
    """Writes the line about the interrupt to stderr, and exits at once with code 130."""
    os.write(2, message().encode())
    os._exit(INTERRUPTED)


def message() -> str:
    """The line for stderr; on a terminal it begins on a new line after the echoed ^C."""
    line = "mpjax: interrupted\n"
    return f"{SHOW_CURSOR}\n{line}" if os.isatty(2) else line


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _raise_again(dropped: Any) -> None:
    """After a callback has dropped a KeyboardInterrupt, raises it again a moment later."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(dropped)

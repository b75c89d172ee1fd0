"""Ctrl-C on the command line: one line on stderr and the exit code 130, whenever it comes.

Python raises KeyboardInterrupt wherever the program is. A module of C that is being imported turns
it into an ImportError, and a callback, such as the garbage collector's, drops it.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # nothing may take long to import until Ctrl-C is handled
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED = 130  # as shells report a program that SIGINT ends
IMPORTING = "<frozen importlib._bootstrap>"  # the file of the frames in which Python imports
AGAIN_SECONDS = 0.01
SHOW_CURSOR = "\x1b[?25h"  # a bar that shows progress has hidden it


def handle(run: Callable[[], None]) -> None:
    """Answers Ctrl-C while `run` runs the whole command line, which ends the process.

    `run` sees KeyboardInterrupt, but for an interrupt of an import, where nothing is at stake:
    that ends the process at once.
    """
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _raise_again
    try:
        run()
    except KeyboardInterrupt:
        leave()
    finally:
        # While Python shuts down, nobody catches what is raised, and all has been said.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def leave() -> NoReturn:
    """Ends the process at once, as interrupted."""
    os.write(2, message().encode())
    os._exit(INTERRUPTED)


def message() -> str:
    """The line on stderr; a terminal shows ^C as well, which gets a line of its own."""
    line = "mpjax: interrupted\n"
    return f"{SHOW_CURSOR}\n{line}" if os.isatty(2) else line


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _raise_again(dropped: Any) -> None:
    """Raises a KeyboardInterrupt that a callback has dropped once more, a moment later."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(dropped)

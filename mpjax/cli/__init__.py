"""The command line, `mpjax`.

There is one module for each command. JAX takes seconds to import. So commands import it, and
modules that need it, only when they run, and help answers at once.
"""

from __future__ import annotations

import gc

from mpjax.cli import interrupts

__all__ = ["main"]

# With Python's default, garbage collections take a tenth of the time until the first token:
# importing JAX and tracing programs make some hundred thousand objects that stay.
NEW_OBJECTS = 20_000  # between two collections


def main() -> None:
    """Runs the command line of this process and exits."""
    interrupts.handle(_run)


def _run() -> None:
    gc.set_threshold(NEW_OBJECTS)
    # Imported here, after Ctrl-C is handled, because the import takes a while.
    from mpjax.cli import application

    application.main()

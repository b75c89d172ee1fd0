"""The command line, `mpjax`.

There is one module for each command. JAX takes seconds to import. So commands import it, and
modules that need it, only when they run, and help answers at once.
"""

from __future__ import annotations

from mpjax.cli import interrupts

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process and exits."""
    interrupts.handle(_run)


def _run() -> None:
    # Imported here, after Ctrl-C is handled, because the import takes a while.
    from mpjax.cli import application

    application.main()

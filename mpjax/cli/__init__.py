"""The command line, `mpjax`.

One module for each command. JAX takes seconds to import, so they import it, and everything above
it, only when they run: help answers at once.
"""

from __future__ import annotations

from mpjax.cli import interrupts

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process and exits."""
    interrupts.handle(_run)


def _run() -> None:
    # Imported here, because a person may press Ctrl-C meanwhile.
    from mpjax.cli import application

    application.main()

"""The command line, `mpjax`.

One module for each command. JAX takes seconds to import, so they import it, and everything above
it, only when they run: help answers at once.
"""

from mpjax.cli.application import main

__all__ = ["main"]

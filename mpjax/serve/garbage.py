"""Keeps garbage collections short while an engine serves."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Excludes all existing objects from garbage collection while the context is open.

    A full collection visits every object. JAX and the compiled programs have some hundred thousand,
    so a collection would stall all requests for a third of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

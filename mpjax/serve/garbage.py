"""Short collections of garbage while an engine serves."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Excludes all existing objects from garbage collection while the context is open.

    A full collection visits each of them. Those of JAX and of compiled programs are some hundred
    thousand, which takes a third of a second, in which no request gets a token.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

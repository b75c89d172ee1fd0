"""Whether the engines of several processes are alike, as they must be to run the same programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SMALL_BYTES = 2**16  # of an array whose values are compared


def outline(tree: Any) -> list[str]:
    """The path, shape and dtype of each array, and the values of small ones that all devices have.

    A model's small arrays are its norms and biases, in which most checkpoints differ. Reading all
    weights would take as long as loading them.
    """
    found = []
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        text = f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}"
        if array.is_fully_replicated and array.nbytes <= SMALL_BYTES:
            text += " " + hashlib.sha256(np.asarray(array).tobytes()).hexdigest()
        found.append(text)
    return found


def require_alike(parts: Mapping[str, Any]) -> None:
    """Compares the processes of JAX, all of which call it with the same keys.

    parts: by a noun for the message, something whose `repr` is compared.

    Raises ValueError in all processes if one differs from process 0.
    """
    digests = [hashlib.sha256(repr(part).encode()).digest() for part in parts.values()]
    own = np.frombuffer(b"".join(digests), np.uint32).reshape(len(parts), -1)
    found = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, *own.shape)
    for process, theirs in enumerate(found):
        if differing := [n for n, a, b in zip(parts, theirs, found[0], strict=True) if any(a != b)]:
            raise ValueError(
                f"process {process} and process 0 have different {', '.join(differing)}: start "
                "all processes with the same model and options"
            )

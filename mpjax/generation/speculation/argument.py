"""Reads the argument `speculate` of the functions that generate."""

from __future__ import annotations

from typing import Any

from mpjax.generation.speculation.heads import read_head
from mpjax.generation.speculation.proposer import Proposer
from mpjax.kernels.checks import require_type


def read_speculate(speculate: Any) -> Proposer | None:
    """The argument as a proposer: "mtp" is MTP(), and "eagle:4" is Eagle(4).

    Raises ValueError unless it is a Proposer, such a text, or None.
    """
    if isinstance(speculate, str) and (found := read_head(speculate)) is not None:
        return found
    if speculate is not None:
        hint = ', such as mpjax.Ngram(), mpjax.Draft(lm), or "mtp" or "eagle" for a loaded head'
        require_type("speculate", speculate, Proposer, hint=hint)
    return speculate  # type: ignore[no-any-return]

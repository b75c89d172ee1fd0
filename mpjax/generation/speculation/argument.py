"""Reads the argument `speculate` of the functions that generate."""

from __future__ import annotations

from typing import Any

from mpjax.generation.speculation.mtp import read_mtp
from mpjax.generation.speculation.proposer import Proposer
from mpjax.kernels.checks import require_type


def read_speculate(speculate: Any) -> Proposer | None:
    """The argument as a proposer: "mtp" is MTP(), and "mtp:4" is MTP(4).

    Raises ValueError unless it is a Proposer, such a text, or None.
    """
    if isinstance(speculate, str) and (found := read_mtp(speculate)) is not None:
        return found
    if speculate is not None:
        hint = ', such as mpjax.Ngram(), mpjax.Draft(lm), or "mtp" for the model\'s own head'
        require_type("speculate", speculate, Proposer, hint=hint)
    return speculate  # type: ignore[no-any-return]

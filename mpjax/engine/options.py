"""Rarer arguments of an engine and of its requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpjax.engine.state import CANDIDATES
from mpjax.kernels.checks import did_you_mean, nearest, require_type
from mpjax.sampling import Sampling
from mpjax.speculation.proposer import Proposer, read_speculate

_SAMPLING = {field.name for field in dataclasses.fields(Sampling)}


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Rarer arguments of `Engine`, which says what they do."""

    max_gap: float | None = None
    share_prefixes: bool = True
    ride: bool = False
    speculate: Proposer | None = None

    @classmethod
    def of(cls, how: Mapping[str, Any]) -> EngineOptions:
        """The options in keywords. Raises TypeError for unknown ones, ValueError for wrong ones."""
        _require_known("Engine", cls, how)
        rarer = cls(**how)
        for name in ("share_prefixes", "ride"):
            require_type(name, getattr(rarer, name), bool)
        read_speculate(rarer.speculate)
        gap: Any = rarer.max_gap
        is_number = isinstance(gap, int | float) and not isinstance(gap, bool)
        if gap is not None and not (is_number and gap > 0):
            raise ValueError(f"max_gap is {gap!r}: expected seconds above 0, inf, or None")
        return rarer


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Rarer arguments of `Engine.submit`, which says what they do."""

    priority: int = 0
    prompt_logprobs: bool = False
    logprobs: int = 0
    chat_template: str | None = None

    @classmethod
    def of(cls, how: Mapping[str, Any]) -> RequestOptions:
        """The options in keywords. Raises TypeError for unknown ones, ValueError for wrong ones."""
        _require_known("submit", cls, how)
        options = cls(**how)
        if isinstance(options.priority, bool) or not isinstance(options.priority, int):
            raise ValueError(f"priority is {options.priority!r}: expected a whole number")
        require_type("prompt_logprobs", options.prompt_logprobs, bool)
        number = options.logprobs
        if type(number) is not int or not 0 <= number <= CANDIDATES:
            raise ValueError(
                f"logprobs is {number!r}: expected how many candidates to tell, 0 to {CANDIDATES}"
            )
        return options


def _require_known(function: str, options: type, how: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments that are no fields of a dataclass."""
    known = {field.name for field in dataclasses.fields(options)}
    if unknown := sorted(set(how) - known):
        hint = did_you_mean(nearest(unknown[0], sorted(known)))
        if function == "submit" and unknown[0] in _SAMPLING:
            hint = f": pass sampling=Sampling({unknown[0]}=...)"
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}{hint}")
